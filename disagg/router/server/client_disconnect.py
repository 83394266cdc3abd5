"""Whether the client is still there: what nobody waits for any more is given up at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from starlette.types import Scope

CONNECTION = "disagg.connection"
"""Where the server leaves a request's `Connection` in the scope's state."""


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete."""


class Connection(Protocol):
    """A client's connection, as the server sees it."""

    loop: asyncio.AbstractEventLoop

    def watch(self, left: Callable[[], None] | None) -> None:
        """From now on `left` is called when the client closes it, or was before; None: nobody
        asks any more."""


class WhileConnected:
    """Cancels what runs inside when the client closes its connection, and raises `ClientLeft`.

    As `asyncio.timeout`, with the connection for a clock.
    """

    def __init__(self, scope: Scope) -> None:
        self._connection: Connection = scope["state"][CONNECTION]
        self._left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task(self._connection.loop)
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._connection.watch(self._leave)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.watch(None)
        if not self._left:
            return
        # Others may want the task cancelled too; only our own cancellation is ours to translate.
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientLeft from error

    def _leave(self) -> None:
        self._left = True
        self._task.cancel()
