"""Splits an event stream into whole events.

A stream that breaks off must never end in the middle of an event.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from disagg.router.api.errors import ApiError

END, DONE = b"\n\n", b"data: [DONE]"
_DATA = b"data: "
# The first bytes of an event in which an engine reports an error.
_FAILURES = (b'data: {"error"', b"event: error\n", b"event: response.failed\n")
_LONGEST_EVENT = 16 << 20  # bytes: a million prompt tokens, or a whole response in its last event


class Watcher(Protocol):
    """Processes the bytes of an answer before the client gets them."""

    failure: ApiError | None
    """Why the answer is wrong; None as long as it may be right."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete, apart from the bytes of `left`."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine; returns the bytes to send to the client."""

    def left(self) -> bytes:
        """The bytes to send at the end of a complete answer."""


def content_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None if it has none, such as `[DONE]`."""
    at = 0 if event.startswith(_DATA) else event.find(b"\n" + _DATA) + 1
    if not event.startswith(_DATA, at):
        return None
    try:
        content = msgspec.json.decode(event[at + len(_DATA) :])
    except (msgspec.MsgspecError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def with_content(event: bytes, content: dict[str, Any]) -> bytes:
    """The event with its JSON replaced by `content`."""
    return event[: event.index(_DATA)] + _DATA + msgspec.json.encode(content)


def failure_in(events: bytes) -> int | None:
    """The offset of the first event that reports an engine's failure, not a client's mistake."""
    for mark in _FAILURES:
        # JSON strings escape quotes and line ends, so no generated text can contain a mark.
        at = events.find(mark)
        if at >= 0 and _is_engine_fault(events[at:]):
            return at
    return None


def _is_engine_fault(events: bytes) -> bool:
    error = (content_of(events.partition(END)[0]) or {}).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return not isinstance(code, int) or code >= 500


class Splitter:
    """Holds back the beginning of an event until its end arrives."""

    def __init__(self) -> None:
        self._tail = b""
        self.failure: ApiError | None = None

    def whole(self, data: bytes) -> bytes:
        """The events that are now complete. Sets `failure` if an event exceeds the size limit."""
        if self._tail:
            data = self._tail + data
        cut = data.rfind(END) + len(END)
        if cut < len(END):
            cut = 0
            if len(data) > _LONGEST_EVENT:
                self.failure = ApiError(502, "the engine sends no events")
        self._tail = data[cut:]
        return data[:cut]


class Plain(Splitter):
    """The answer of one engine. It is whole once its last event begins with one of `ends`."""

    def __init__(self, ends: tuple[bytes, ...]) -> None:
        super().__init__()
        self._ends, self.is_whole = ends, False

    def feed(self, data: bytes) -> bytes:
        """See `Watcher`."""
        events = self.whole(data)
        last = events.rfind(END, 0, -len(END))
        begins = 0 if last < 0 else last + len(END)
        self.is_whole = self.is_whole or events.startswith(self._ends, begins)
        return events

    def left(self) -> bytes:
        """See `Watcher`."""
        return b""
