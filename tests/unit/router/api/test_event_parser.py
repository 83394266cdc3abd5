"""However a stream is written and cut, it says the same, and its bytes are all there."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.router.event_forms import pieces, read, written

from disagg.router.api.event_parser import Block, EventParser, is_usual

JSONS = st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["", "error", "message_stop"]),
        JSONS.map(lambda content: json.dumps(content, ensure_ascii=False, separators=(",", ":"))),
    ),
    max_size=5,
)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_the_events_of_any_form_and_cut(data: st.DataObject) -> None:
    events = data.draw(EVENTS)
    stream = data.draw(written(events))
    parser, blocks = EventParser(), list[Block]()
    for piece in data.draw(pieces(stream)):
        blocks += parser.feed(piece)
    if (last := parser.end()) is not None:  # a byte order mark alone
        blocks.append(last)
    assert b"".join(block.raw for block in blocks) == stream
    translated = b"".join(block.event for block in blocks)
    assert not translated or is_usual(translated)
    assert read(translated) == events


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_what_is_usual_needs_no_translation(data: st.DataObject) -> None:
    """The fast path is right whatever it lets pass: the parser would change nothing."""
    alphabet = ["data: ", "event: ", "x", "\n", "\n\n", "\r", ":", "data:", '{"a"}', "\ndata: "]
    text = "".join(data.draw(st.lists(st.sampled_from(alphabet), max_size=12))).encode() + b"\n\n"
    if is_usual(text):
        assert [block.event for block in EventParser().feed(text)] == [
            event + b"\n\n" for event in text.split(b"\n\n")[:-1]
        ]


@pytest.mark.parametrize(
    ("stream", "is_so"),
    [
        (b"data: x\n\n", True),
        (b"data: x\n\ndata: y\n\n", True),
        (b"event: a\ndata: x\n\ndata: y\n\n", True),
        (b"data: y\n\nevent: a\ndata: x\n\n", True),
        (b": keep-alive\n\n", False),
        (b"data: x\n: keep-alive\n\n", False),
        (b"data: x\n\n\n\n", False),
        (b"data: x\ndata: y\n\n", False),
        (b"event: a\n\nevent: b\ndata: x\ndata: y\n\n", False),
        (b"data:x\n\n", False),
        (b"data: x\r\n\r\n\n\n", False),
        (b"\xef\xbb\xbfdata: x\n\n", False),
    ],
)
def test_what_is_usual(stream: bytes, is_so: bool) -> None:
    assert is_usual(stream) is is_so


@pytest.mark.parametrize(
    ("stream", "event", "raw"),
    [
        (b"data: x", b"data: x\n\n", b"data: x"),
        (b"data: x\n", b"data: x\n\n", b"data: x\n"),
        (b"event: a\r\ndata:x\r", b"event: a\ndata: x\n\n", b"event: a\r\ndata:x\r"),
        (b": half a comm", b"", b": half a comm"),
        (b"id: 3\n", b"", b"id: 3\n"),
    ],
)
def test_a_stream_that_ends_without_a_blank_line(stream: bytes, event: bytes, raw: bytes) -> None:
    parser = EventParser()
    assert parser.feed(stream) == []
    assert parser.end() == Block(raw, event)
    assert parser.is_idle or stream.endswith(b"\r")
