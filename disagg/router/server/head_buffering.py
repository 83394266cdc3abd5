"""Sends an answer's head together with the bytes that follow it."""

from __future__ import annotations

import asyncio
from typing import Any


class HeadBufferingTransport:
    """A client's transport that sends an answer's head together with the bytes that follow it.

    That is one packet and one system call instead of two. The head waits until the end of this
    turn of the event loop at most.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.is_closing = transport.is_closing  # called often
        self._head: bytes | None = None
        self.next_is_head = False
        """Whether the next write is an answer's head."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head is not None:
            self._transport.write(self._head + data)
            self._head = None
        elif self.next_is_head:
            self.next_is_head, self._head = False, data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self._transport.write(head)
