"""Ways to write an event stream other than vLLM's, for `disagg bench router-faults`, and a reader.

The reader follows the standard (https://html.spec.whatwg.org/multipage/server-sent-events.html) and
shares nothing with the router, so that it can judge what the router passes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

USUAL = "usual"
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")


def _comments(event: bytes) -> bytes:
    """vLLM's own, with `--sse-keep-alive-interval`."""
    return b": keep-alive\n\n" + event


def _comments_within(event: bytes) -> bytes:
    return b":a\n: b\n" + event[:-1] + b": data: [DONE]\n\n"


def _two_lines(event: bytes) -> bytes:
    return event.replace(b"data: {", b"data: {\ndata: ", 1)


def _fields(event: bytes) -> bytes:
    return b"id: 7\nretry: 1000\n" + event.replace(b"data: ", b"event: \ndata:", 1)


FORMS: Mapping[str, Callable[[bytes], bytes]] = {
    USUAL: lambda event: event,
    "comments": _comments,
    "comments-within": _comments_within,
    "crlf": lambda event: event.replace(b"\n", b"\r\n"),
    "cr": lambda event: event.replace(b"\n", b"\r"),
    "no-space": lambda event: event.replace(b"data: ", b"data:", 1),
    "two-lines": _two_lines,
    "fields": _fields,
}
"""By name: how an event in vLLM's form is written."""


def data_of(stream: bytes) -> list[bytes] | None:
    """The data of each event; None if the stream ends within an event."""
    *lines, rest = _LINE_END.split(stream.removeprefix(_BOM))
    found, data = list[bytes](), list[bytes]()
    for line in lines:
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        elif not line and data:
            found.append(b"\n".join(data))
            data = []
    return None if rest or data else found
