"""An engine's answer on its way to the client, as it is and as it comes.

Owns the connection to the engine until the answer has ended in whatever way, and never lets an
incomplete answer look like a complete one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
from starlette.types import Receive, Scope, Send

from disagg.router import upstream
from disagg.router.errors import ApiError

logger = logging.getLogger(__name__)


class Relayed:
    """Sends one answer, as an ASGI app.

    `first_byte` is called when the answer's first bytes have come, `ended` exactly once, when
    the engine has nothing more to do with the request.
    """

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        between_bytes_s: float,
        *,
        first_byte: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.status_code = answer.status
        self._answer, self._between_bytes_s = answer, between_bytes_s
        self._first_byte, self._ended = first_byte, ended

    def discard(self) -> None:
        """Nobody gets this answer: close it unread."""
        self._answer.close()
        self._ended()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay to the end; sends an error event, or cuts the connection, if that is not to be."""
        last = b""
        try:
            headers = upstream.to_client(self._answer.raw_headers)
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": headers}
            )
            await self._relay(send)
        except ApiError as error:
            logger.warning("a decode engine's answer broke off: %s", error.message)
            if not self._is_plain_events():
                return  # the server cuts the connection, which is what an incomplete body means
            last = error.event()
        finally:
            # Closing the connection is how the engine learns that nobody listens any more.
            self._answer.close()
            self._ended()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _relay(self, send: Send) -> None:
        chunk = await self._chunk()
        self._first_byte()
        while chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await self._chunk()

    async def _chunk(self) -> bytes:
        """What has come since; empty at the end. What goes wrong becomes an `ApiError`."""
        try:
            async with asyncio.timeout(self._between_bytes_s):
                return await self._answer.content.readany()
        except TimeoutError as error:
            raise ApiError(
                504, f"the engine was silent for {self._between_bytes_s:g} s in mid-answer"
            ) from error
        except aiohttp.ClientError as error:
            raise ApiError(502, "the engine's answer broke off") from error

    def _is_plain_events(self) -> bool:
        headers = self._answer.headers
        is_events = headers.get("content-type", "").startswith("text/event-stream")
        return is_events and not {"content-encoding", "content-length"} & {
            name.lower() for name in headers
        }
