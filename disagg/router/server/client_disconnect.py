"""Cancels a request's work as soon as its client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from starlette.types import Scope

from disagg.router.api.errors import ApiError

CONNECTION = "disagg.connection"
"""The key of a request's `Connection` in the state of its ASGI scope."""


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete."""


class Connection(Protocol):
    """A client's connection to the server."""

    loop: asyncio.AbstractEventLoop
    refusal: ApiError | None
    """The error with which the server itself answered, before it closed the connection."""

    def watch(self, on_close: Callable[[], None] | None) -> None:
        """Call `on_close` when the client closes the connection, at once if it is closed already;
        None: call nothing any more."""


class WhileConnected:
    """A context manager. When the client closes its connection, it cancels the body and raises
    `ClientLeft`, as `asyncio.timeout` does with `TimeoutError`."""

    def __init__(self, scope: Scope) -> None:
        self._connection: Connection = scope["state"][CONNECTION]
        self._left = False

    def __enter__(self) -> None:
        task = asyncio.current_task(self._connection.loop)
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._connection.watch(self._leave)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.watch(None)
        if not self._left:
            return
        # Only this manager's own cancellation becomes `ClientLeft`; any other one passes.
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientLeft from error

    def _leave(self) -> None:
        self._left = True
        self._task.cancel()
