"""Event streams written in any way that the standard allows, and a reader that follows its text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

BOM = b"\xef\xbb\xbf"
Said = tuple[str, str]
"""An event's name, empty if it has none, and its data."""


def read(stream: bytes) -> list[Said]:
    """All events, as the standard reads them (9.2.6); what no blank line ends is left out."""
    text = stream.removeprefix(BOM).decode()
    lines = re.split("\r\n|\r|\n", text)
    events, name, data = list[Said](), "", list[str]()
    for line in lines[:-1]:
        if not line:
            if data:
                events.append((name, "\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return events


def usual(events: Sequence[Said]) -> bytes:
    """As vLLM writes them."""
    return "".join(
        (f"event: {name}\n" if name else "") + f"data: {data}\n\n" for name, data in events
    ).encode()


def contents(stream: bytes) -> list[tuple[str, Any]]:
    """The events with their JSON parsed."""
    return [(n, d if d == "[DONE]" else json.loads(d)) for n, d in read(stream)]


_ENDS = st.sampled_from(["\n", "\r", "\r\n"])
_NO_LF = st.sampled_from(["\r", "\r\n"])
_COMMENTS = st.sampled_from([": keep-alive", ":", ":data: [DONE]", ': {"error"', ": ä"])
_OTHERS = st.sampled_from(["id: 7", "id", "retry: 3000", "unknown: x", "datas: [DONE]"])


@st.composite
def written(draw: st.DrawFn, events: Sequence[Said]) -> bytes:
    """One way to write these events."""
    lines = list[str]()
    for name, data in events:
        lines += draw(st.lists(_COMMENTS, max_size=2))
        if draw(st.booleans()):
            lines += ["", *draw(st.lists(st.just(""), max_size=1))]
        field_lines = [
            f"data:{draw(st.sampled_from([' ', '']))}{part}" for part in _parts(draw, data)
        ]
        if name:
            at = draw(st.sampled_from([0, len(field_lines)]))
            field_lines.insert(at, f"event:{draw(st.sampled_from([' ', '']))}{name}")
        for line in field_lines:
            lines += draw(st.lists(st.one_of(_COMMENTS, _OTHERS), max_size=1))
            lines.append(line)
        lines.append("")
    text, end = draw(st.sampled_from(["", BOM.decode()])), ""
    for line in lines:
        # A line end of \r and an empty line's \n would be one end.
        end = draw(_NO_LF if end == "\r" and not line else _ENDS)
        text += line + end
    return text.encode()


def _parts(draw: st.DrawFn, data: str) -> list[str]:
    """The data in one line, or in several that are broken behind a comma between tokens."""
    if data == "[DONE]" or not draw(st.booleans()):
        return [data]
    spread = json.dumps(json.loads(data), indent=1, ensure_ascii=False)
    return spread.split("\n") if draw(st.booleans()) else [data[:1], data[1:]]


@st.composite
def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The bytes in pieces, cut anywhere."""
    if draw(st.booleans()):
        size = draw(st.integers(1, 40))
        return [data[at : at + size] for at in range(0, len(data), size)]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if b > a]
