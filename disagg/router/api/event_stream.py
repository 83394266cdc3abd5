"""Watches an answer that is an event stream.

Every watcher gets whole events in the usual form (`event_parser.py`). A stream that breaks off must
never end in the middle of an event.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from disagg.router.api.errors import ApiError
from disagg.router.api.event_parser import BOM, DATA, END, Block, EventParser, is_usual

DONE = b"data: [DONE]"
_BEGINNINGS = b"de"  # of `data` and `event`
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

    def finish(self) -> bytes:
        """The engine's answer has ended properly; returns the bytes to send of what was held."""

    def left(self) -> bytes:
        """The bytes to send at the end of a complete answer."""


def content_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None if it has none, such as `[DONE]`."""
    at = 0 if event.startswith(DATA) else event.find(b"\n" + DATA) + 1
    if not event.startswith(DATA, at):
        return None
    try:
        content = msgspec.json.decode(event[at + len(DATA) :])
    except (msgspec.MsgspecError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def with_content(event: bytes, content: dict[str, Any]) -> bytes:
    """The event with its JSON replaced by `content`."""
    return event[: event.index(DATA)] + DATA + msgspec.json.encode(content)


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


class EventWatcher:
    """Splits an answer into whole events. It hands them, in the usual form, to `take`, whatever
    form they have. The client gets the bytes that came, apart from what `take` changes.

    It holds back the beginning of an event until its end arrives.
    """

    def __init__(self) -> None:
        self._tail = b""
        # While an event in another form is under way; else `_tail` has what is held back.
        self._parser: EventParser | None = None
        self._is_start = self._is_first = True
        self.failure: ApiError | None = None

    def take(self, events: bytes) -> bytes:
        """Process whole events in the usual form; returns what to send in their place. May set
        `failure`."""
        raise NotImplementedError

    def left(self) -> bytes:
        """See `Watcher`."""
        return b""

    @property
    def is_whole(self) -> bool:
        """See `Watcher`."""
        raise NotImplementedError

    def feed(self, data: bytes) -> bytes:
        """See `Watcher`. Sets `failure` if an event exceeds the size limit."""
        if self._parser is not None:
            return self._parsed(self._parser, data)
        if self._tail:
            data = self._tail + data
        if data.endswith(END) and is_usual(data):  # nearly every chunk of vLLM's
            self._tail, self._is_start = b"", False
            return self.take(data)
        cut = data.rfind(END) + len(END)
        if cut < len(END):
            cut = 0
        events, tail = data[:cut], data[cut:]
        if (events and not is_usual(events)) or not _may_be_usual(tail):
            self._tail, self._parser = b"", EventParser(is_start=self._is_start)
            return self._parsed(self._parser, data)
        self._tail = tail
        if not events:
            self._check_size(len(tail))
            return b""
        self._is_start = False
        return self.take(events)

    def finish(self) -> bytes:
        """See `Watcher`. An event without its blank line counts if its data is whole."""
        if self._parser is None:
            parser = EventParser(is_start=self._is_start)
            parser.feed(self._tail)
        else:
            parser = self._parser
        self._tail, self._parser = b"", None
        block = parser.end()
        if block is None:
            return b""
        if block.event and not (_says_done(block.event) or content_of(block.event) is not None):
            return b""
        said = self._shown(block)
        if self.is_whole and not self.left():
            return said
        return said + _blank_line_behind(said) if block.event else b""  # other events follow

    def restart(self) -> None:
        """The next bytes are another engine's."""
        self._tail, self._parser, self.failure = b"", None, None
        self._is_start, self._is_first = True, False

    def _parsed(self, parser: EventParser, data: bytes) -> bytes:
        shown = []
        for block in parser.feed(data):
            shown.append(self._shown(block))
            if self.failure is not None:
                return b"".join(shown)
        self._check_size(parser.size)
        if parser.is_idle:
            self._parser = None  # events in the usual form may follow
        return b"".join(shown)

    def _shown(self, block: Block) -> bytes:
        raw, event = block
        if self._is_start and not self._is_first:
            raw = raw.removeprefix(BOM)  # it would stand in the middle of the client's stream
        self._is_start = False
        if not event:
            return raw
        said = self.take(event)
        return raw if said == event else _in_form_of(raw, event, said)

    def _check_size(self, size: int) -> None:
        if size > _LONGEST_EVENT:
            self.failure = ApiError(502, "the engine sends no events")


def _may_be_usual(tail: bytes) -> bool:
    """Whether an event in the usual form may begin so. A comment does not, and must not wait."""
    return not tail or (tail[0] in _BEGINNINGS and b"\r" not in tail)


def _says_done(event: bytes) -> bool:
    return event.startswith(DONE)


def _in_form_of(raw: bytes, event: bytes, said: bytes) -> bytes:
    """`said`, which takes the place of `event`, written as `raw` is, if that is simple."""
    (head, _, data), (said_head, _, said_data) = event.partition(DATA), said.partition(DATA)
    data, said_data = data.removesuffix(END), said_data.removesuffix(END)
    if not said_data or head != said_head or END in said_data or raw.count(data) != 1:
        return said
    return raw.replace(data, said_data)


def _blank_line_behind(said: bytes) -> bytes:
    if not said or said.endswith(END):
        return b""
    return b"\n" if said.endswith((b"\n", b"\r")) else END


class Plain(EventWatcher):
    """The answer of one engine. It is whole once its last event begins with one of `ends`.

    An engine may end its answer without that event. `last`: bytes that only the last event before
    it has.
    """

    def __init__(self, ends: tuple[bytes, ...], last: bytes | None = None) -> None:
        super().__init__()
        self._ends, self._last = ends, last
        self._is_whole, self._latest = False, b""

    @property
    def is_whole(self) -> bool:
        """See `Watcher`."""
        return self._is_whole

    def take(self, events: bytes) -> bytes:
        """See `EventWatcher`."""
        last = events.rfind(END, 0, -len(END))
        begins = 0 if last < 0 else last + len(END)
        self._is_whole = self._is_whole or events.startswith(self._ends, begins)
        self._latest = events
        return events

    def finish(self) -> bytes:
        """See `Watcher`."""
        said = super().finish()
        if self._last is not None and self._last in self._latest:
            self._is_whole = True
        return said
