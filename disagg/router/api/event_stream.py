"""An event stream cut into whole events, so that what breaks off never ends in half of one."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from disagg.router.api.errors import ApiError

END, DONE = b"\n\n", b"data: [DONE]"
_DATA = b"data: "
# How an event begins by which an engine says that it failed.
_FAILURES = (b'data: {"error"', b"event: error\n", b"event: response.failed\n")
_LONGEST_EVENT = 16 << 20  # a million prompt tokens, or all of a response in its last event


class Watcher(Protocol):
    """Sees an answer's bytes before the client does."""

    failure: ApiError | None
    """Why the answer cannot be right, once that is known."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing but what `left` says."""

    def feed(self, data: bytes) -> bytes:
        """What to send of what has come."""

    def left(self) -> bytes:
        """What is to be sent at the end of a whole answer."""


def content_of(event: bytes) -> dict[str, Any] | None:
    """The JSON of an event; None if it has none, as `[DONE]`."""
    at = 0 if event.startswith(_DATA) else event.find(b"\n" + _DATA) + 1
    if not event.startswith(_DATA, at):
        return None
    try:
        content = msgspec.json.decode(event[at + len(_DATA) :])
    except (msgspec.MsgspecError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def with_content(event: bytes, content: dict[str, Any]) -> bytes:
    """The event with this content instead of its own."""
    return event[: event.index(_DATA)] + _DATA + msgspec.json.encode(content)


def failure_in(events: bytes) -> int | None:
    """Where an event begins by which an engine says that it failed, and not its client."""
    for mark in _FAILURES:
        # Quotes and line ends are escaped inside of JSON strings: no text looks like this.
        at = events.find(mark)
        if at >= 0 and _is_its_fault(events[at:]):
            return at
    return None


def _is_its_fault(events: bytes) -> bool:
    error = (content_of(events.partition(END)[0]) or {}).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return not isinstance(code, int) or code >= 500


class Splitter:
    """Holds back the beginning of an event until its end has come."""

    def __init__(self) -> None:
        self._tail = b""
        self.failure: ApiError | None = None

    def whole(self, data: bytes) -> bytes:
        """The events that are complete now; sets `failure` if what comes is no event."""
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
    """An answer of one engine; whole when its last event begins with one of `ends`."""

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
