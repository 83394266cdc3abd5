"""Whether the client is still there: what nobody waits for any more is given up at once."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete."""


class WhileConnected:
    """Cancels what runs inside when the client closes its connection, and raises `ClientLeft`.

    As `asyncio.timeout`, with the connection for a clock. The request's body must have been
    read to its end, so that the next message can only be the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._watch = asyncio.create_task(self._wait())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watch.cancel()
        if not self._left:
            return
        # Others may want the task cancelled too; only our own cancellation is ours to translate.
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientLeft from error

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._left = True
        self._task.cancel()
