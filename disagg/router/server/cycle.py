"""One request of a client and its answer, as uvicorn has them, with less work for each header.

uvicorn searches every name and every value by itself, with regular expressions. Here one look takes
all names, and one all values. The bytes sent must be those that uvicorn would send.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_NOT_IN_NAMES = bytes(range(33)) + b'()<>@,;:[]={}\\"\x7f'
_NOT_IN_VALUES = bytes([*range(9), *range(10, 32), 127])
_FRAMING = frozenset([b"content-length", b"transfer-encoding", b"connection"])
_WITHOUT_BODY = (204, 304)


class Cycle(RequestResponseCycle):
    """See `RequestResponseCycle`. The names of headers are in lower case, as ASGI demands."""

    async def send(self, message: Any) -> None:
        """Send a message of the answer. Raises RuntimeError for one that ASGI does not allow."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._send_head(message)
        elif self.response_complete:
            raise RuntimeError(f"{message['type']} came after the end of the answer")
        else:
            self._send_body(message)

    def _send_head(self, message: Message) -> None:
        if message["type"] != "http.response.start":
            raise RuntimeError(f"{message['type']} came before the answer's head")
        self.response_started, self.waiting_for_100_continue = True, False
        status: int = message["status"]
        headers: list[tuple[bytes, bytes]] = [*self.default_headers, *message["headers"]]
        if _has_any(_NOT_IN_NAMES, b"".join([name for name, _ in headers])):
            raise RuntimeError("a header's name has a character that no name may have")
        if _has_any(_NOT_IN_VALUES, b"".join([value for _, value in headers])):
            raise RuntimeError("a header's value has a character that no value may have")
        fields = [b"%b: %b\r\n" % header for header in headers]
        if not self._frame(headers):
            fields.append(b"connection: close\r\n")
        has_body = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        if self.chunked_encoding is None and has_body:
            self.chunked_encoding = True
            fields.append(b"transfer-encoding: chunked\r\n")
        self.transport.write(b"".join([STATUS_LINE[status], *fields, b"\r\n"]))

    def _frame(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Note how the body ends. Whether these headers say what becomes of the connection."""
        says_close = False
        for name, value in headers:
            if name not in _FRAMING:
                continue
            if name == b"connection":
                says_close |= b"close" in [token.strip() for token in value.lower().split(b",")]
            elif name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length, self.chunked_encoding = 0, True
        self.keep_alive = self.keep_alive and not says_close
        return self.keep_alive or says_close

    def _send_body(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} came within an answer's body")
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(chunk + b"0\r\n\r\n" if is_last else chunk)
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the body is longer than its content-length")
            self.transport.write(body)
        if is_last:
            self._end()

    def _end(self) -> None:
        if self.expected_content_length != 0:
            raise RuntimeError("the body is shorter than its content-length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def _has_any(forbidden: bytes, data: bytes) -> bool:
    return len(data.translate(None, forbidden)) != len(data)
