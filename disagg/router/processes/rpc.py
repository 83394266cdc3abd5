"""Remote calls in both directions between two router processes, over a private socket pair.

One JSON object per line: a call `{"id", "call", "with"}`, and its answer `{"id", "result"}` or
`{"id", "failed"}`. The channel ends when either side closes its socket or dies. It must never be
opened on a socket that another program can reach: calls are not authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec

logger = logging.getLogger(__name__)

ASK_S = 2.0
_LONGEST_LINE = 64 << 20
Handlers: TypeAlias = Mapping[str, Callable[[Any], Awaitable[Any]]]


class RpcClosed(Exception):
    """The other side closed the channel, or died."""


class RpcChannel:
    """One end. Calls in either direction are only answered while `serve` runs."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handlers: Handlers
    ) -> None:
        self._reader, self._writer, self._handlers = reader, writer, handlers
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    async def call(self, name: str, argument: Any = None, *, timeout_s: float) -> Any:
        """Call a handler of the other side; returns its result.

        Raises RpcClosed, TimeoutError, or RuntimeError with the error of the handler.
        """
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "call": name, "with": argument})
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._waiting.pop(number, None)

    async def serve(self) -> None:
        """Answer calls until the other side closes."""
        try:
            while line := await self._reader.readline():
                self._take(msgspec.json.decode(line))
        except ConnectionError:
            pass  # the other process was killed
        finally:
            self.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RpcClosed())

    def close(self) -> None:
        """Close the channel; `serve` returns on both sides."""
        self._writer.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "call" in message:
            task = asyncio.create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        future = self._waiting.get(message["id"])
        if future is None or future.done():
            return  # the caller has timed out
        if "failed" in message:
            future.set_exception(RuntimeError(message["failed"]))
        else:
            future.set_result(message["result"])

    async def _answer(self, message: dict[str, Any]) -> None:
        answer = {"id": message["id"]}
        try:
            answer["result"] = await self._handlers[message["call"]](message["with"])
        except Exception as error:  # noqa: BLE001 (sent to the caller)
            answer["failed"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RpcClosed):
            self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer.is_closing():
            raise RpcClosed
        self._writer.write(msgspec.json.encode(message) + b"\n")


async def open_channel(sock: socket.socket, handlers: Handlers) -> RpcChannel:
    """This process's end. Takes over the socket."""
    reader, writer = await asyncio.open_connection(sock=sock, limit=_LONGEST_LINE)
    return RpcChannel(reader, writer, handlers)
