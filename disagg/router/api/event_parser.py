"""Reads event streams in every form that the standard allows.

The standard: https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6. Lines
end in CR, LF or CRLF; a comment may stand between any two lines; the space behind a colon may be
missing; one event may have several `data` lines. vLLM writes one of these forms only, the usual
one. This module finds out whether bytes have that form, and translates all others into it. The
bytes that came are kept beside the translation, because the client gets those. Does no I/O.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

END = b"\n\n"
DATA = b"data: "
_NEXT = END + DATA
BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_USUAL_WITH_NAMES = re.compile(rb"(?:(?:event: [^\n]*\n)?data: [^\n]*\n\n)*+")


class Block(NamedTuple):
    """Bytes of a stream that may be passed on alone. `raw`: as they came. `event`: what they say in
    the usual form; empty if they have no data, such as comments."""

    raw: bytes
    event: bytes


def is_usual(events: bytes) -> bool:
    """Whether these bytes, which end in a blank line, are events in the usual form only: a `data`
    line and a blank line, perhaps with an `event` line before."""
    if b"\r" in events:
        return False
    if events.startswith(DATA):
        # As many lines as events of two lines have. Counting is faster than the expression.
        lines = events.count(b"\n")
        if lines == 2 or lines == 2 * events.count(_NEXT) + 2:
            return True
    return _USUAL_WITH_NAMES.fullmatch(events) is not None


class EventParser:
    """Splits bytes into blocks, however they are cut.

    `is_start`: whether the next byte is a stream's first one, where a byte order mark may stand.
    """

    def __init__(self, *, is_start: bool = True) -> None:
        self._is_start, self._is_behind_cr = is_start, False
        self._line: list[bytes] = []  # pieces of the line that has not ended
        self._raw: list[bytes] = []  # the lines of the block that has not ended
        self._name, self._data, self._has_fields = b"", list[bytes](), False
        self.size = 0
        """How many bytes of an unfinished block are held."""

    @property
    def is_idle(self) -> bool:
        """Whether the next byte begins a new block."""
        return not self.size and not self._is_behind_cr

    def feed(self, data: bytes) -> list[Block]:
        """The blocks that are now complete. A comment before an event is complete with its line."""
        blocks, at = list[Block](), 0
        self.size += len(data)
        if self._is_behind_cr and data.startswith(b"\n"):  # the second half of a CRLF
            at = 1
            self._raw.append(b"\n")
            if len(self._raw) == 1:
                blocks.append(self._block())
        for end in _LINE_END.finditer(data, at):
            line = b"".join((*self._line, data[at : end.start()]))
            self._line, at = [], end.end()
            if (block := self._take(line, end[0])) is not None:
                blocks.append(block)
        if data:
            self._is_behind_cr = data.endswith(b"\r")
        if at < len(data):
            self._line.append(data[at:])
        return blocks

    def end(self) -> Block | None:
        """The last block, of a stream that ended without a blank line; None if nothing is left."""
        if not self.size:
            return None
        line, self._line = b"".join(self._line), []
        if line and (block := self._take(line, b"")) is not None:
            return block
        return self._block()

    def _take(self, line: bytes, end: bytes) -> Block | None:
        """One whole line; returns the block that it completes."""
        self._raw.append(line + end)
        if self._is_start:
            self._is_start = False
            line = line.removeprefix(BOM)
        is_comment = line.startswith(b":")
        if line and not is_comment:
            self._has_fields = True
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"event":
                self._name = value
        elif not (is_comment and self._has_fields):
            return self._block()
        return None

    def _block(self) -> Block:
        raw = b"".join(self._raw)
        event = _usual(self._name, self._data) if self._data else b""
        self._raw, self._name, self._data, self._has_fields = [], b"", [], False
        self.size -= len(raw)
        return Block(raw, event)


def _usual(name: bytes, lines: list[bytes]) -> bytes:
    data = lines[0] if len(lines) == 1 else _one_line(lines)
    return (b"event: " + name + b"\n" if name else b"") + DATA + data + END


def _one_line(lines: list[bytes]) -> bytes:
    """Data of several lines in one. JSON may be broken between its tokens only."""
    try:
        return msgspec.json.format(b"\n".join(lines), indent=-1)
    except (msgspec.MsgspecError, ValueError):
        return b" ".join(lines)
