"""Parses on behind the head of a request that offers another protocol (`Upgrade`).

The router takes no offer: such a request is an ordinary one (RFC 9110, section 7.8). llhttp ends at
its head, and would take the body for the next request. So another parser begins with the fields
that frame the body, and reads on. It must never report these fields, nor read a body otherwise than
the first parser would have read it without the offer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import httptools

_FRAMING = (b"connection", b"content-length", b"transfer-encoding")


class Receiver(Protocol):
    """What a parser calls."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class _BehindHead:
    """Passes on what the parser calls, but for its first head."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._in_head = True
        self.on_body = receiver.on_body
        self.on_message_complete = receiver.on_message_complete

    def on_message_begin(self) -> None:
        if not self._in_head:
            self._receiver.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._in_head:
            self._receiver.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            self._receiver.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._in_head:
            self._in_head = False
        else:
            self._receiver.on_headers_complete()


def request_parser(receiver: Receiver | _BehindHead) -> httptools.HttpRequestParser:
    """A parser of requests, as uvicorn makes it."""
    parser = httptools.HttpRequestParser(receiver)
    # Else a request behind one with `Connection: close` would be an error before the answer.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def parser_of_body(
    receiver: Receiver, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> httptools.HttpRequestParser:
    """A parser for the body behind a head, and for all that follows.

    `version`: of HTTP, such as 1.1. `headers`: of the head; names in lower case. Raises
    `HttpParserError`.
    """
    parser = request_parser(_BehindHead(receiver))
    fields = [b"%b: %b\r\n" % field for field in headers if field[0] in _FRAMING]
    parser.feed_data(b"POST / HTTP/%b\r\n%b\r\n" % (version.encode(), b"".join(fields)))
    return parser
