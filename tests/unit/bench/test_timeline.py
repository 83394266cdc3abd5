"""A request on a time axis, from the spans of its trace."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from disagg.bench.timeline import Event, Span, Timeline, picture, timeline
from disagg.errors import DisaggError

QUEUED = Path(__file__).with_name("queued_request.json")
BEGIN = 1_700_000_000_000_000_000
MB = 10**6


def at(seconds: float) -> int:
    return BEGIN + round(seconds * 1e9)


def llm_request(tokens: int, begin: float, first: float, computed: float) -> Span:
    return Span(
        "llm_request",
        at(begin),
        at(first),
        {
            "gen_ai.request.max_tokens": tokens,
            "gen_ai.latency.time_to_first_token": first - begin,
            "gen_ai.latency.time_in_model_prefill": computed,
        },
    )


def step(at_s: float, tokens: int, epoch: int = 0) -> Event:
    return Event("step", at(at_s), {"disagg.tokens": tokens, "disagg.epoch": epoch})


def chunk(at_s: float, size: int, seconds: float) -> Event:
    return Event("chunk", at(at_s), {"disagg.bytes": size, "disagg.seconds": seconds})


def handoff(*events: Event, **attributes: Any) -> Span:
    size = sum(event.attributes.get("disagg.bytes", 0) for event in events)
    known = {"disagg.outcome": "loaded", "disagg.bytes": size}
    shown = {f"disagg.{name}": value for name, value in attributes.items()}
    return Span("handoff", at(0.2), at(9), known | shown, events)


SERIAL = [
    Span("/v1/completions", BEGIN, at(9.5), {"disagg.first_byte_ms": 8500.0}),
    Span("prefill", BEGIN, at(4), {"disagg.engine": "prefill-0"}),
    llm_request(1, 0.1, 4.0, 3.8),
    llm_request(8, 4.1, 8.4, 0.1),
    handoff(chunk(8.3, 40 * MB, 4.0)),
]
STEPS = Span("growing lease", at(0.25), at(4), {}, [step(1.25, 128), step(2.25, 256)])
STREAMED = [
    replace(SERIAL[0], attributes={"disagg.first_byte_ms": 5200.0}),
    *SERIAL[1:4],
    STEPS,
    handoff(
        Event("grown", at(1.3), {}),
        chunk(2.3, 15 * MB, 1.0),
        chunk(3.3, 15 * MB, 1.0),
        Event("whole", at(4.0), {}),
        chunk(5.0, 10 * MB, 0.75),
        hidden_bytes=30 * MB,
    ),
]


def bars(line: Timeline) -> list[tuple[str, float, float]]:
    return [
        (bar.kind, round(bar.begin, 6), round(bar.end, 6)) for bar in (*line.prefill, *line.link)
    ]


def test_a_handoff_after_its_prefill() -> None:
    line = timeline(SERIAL, "serial")
    assert bars(line) == [
        ("queue", 0.1, 0.2),
        ("prefill", 0.2, 4.0),
        ("chunk", 4.3, 8.3),
        ("decode", 8.3, 8.5),
    ]
    assert line.hidden == 0
    assert line.summary == "first token after 8.50 s"


def test_chunks_that_came_before_the_lease_was_whole_are_hidden() -> None:
    line = timeline(STREAMED, "streamed")
    assert bars(line) == [
        ("queue", 0.1, 0.2),
        ("prefill", 0.2, 1.25),
        ("prefill", 1.25, 2.25),
        ("prefill", 2.25, 4.0),
        ("hidden", 1.3, 2.3),
        ("hidden", 2.3, 3.3),
        ("chunk", 4.25, 5.0),
        ("decode", 5.0, 5.2),
    ]
    assert [bar.text for bar in line.prefill] == ["waits at prefill", "1", "2", "3"]
    assert line.summary == "first token after 5.20 s; 75% of the bytes hidden"


def test_only_the_last_epoch_of_a_prompt_that_began_anew_is_drawn() -> None:
    steps = [step(1.0, 128), step(2.0, 128, 1), step(3.0, 256, 1)]
    anew = [replace(span, events=steps) if span is STEPS else span for span in STREAMED]
    ends = [round(bar.end, 6) for bar in timeline(anew, "anew").prefill]
    assert ends == [0.2, 2.0, 3.0, 4.0]


def test_a_request_that_waited() -> None:
    """As a deployment of one prefill engine with two seats recorded it: the last of six at once."""
    spans = [
        Span(**{**one, "events": [Event(**event) for event in one["events"]]})
        for one in json.loads(QUEUED.read_text())
    ]
    line = timeline(spans, "the last of six")
    waits = [(bar.text, bar.begin, bar.end) for bar in line.prefill if bar.kind == "queue"]
    (router, *from_router), (prefill, begin, end) = waits
    assert (router, from_router) == ("waits at router", [0.0, pytest.approx(0.0021)])
    assert prefill == "waits at prefill"
    assert begin == pytest.approx(0.0056, abs=1e-3)
    assert end == pytest.approx(38.334 - 6.210, abs=0.01)
    in_queue = next(
        one.attributes["gen_ai.latency.time_in_queue"]
        for one in spans
        if one.attributes.get("gen_ai.request.max_tokens") == 1
    )
    assert 26 < in_queue < end - begin  # vLLM's own figure begins after the step that ran
    (decode,) = [bar for bar in line.link if bar.kind == "queue"]
    assert decode.end - decode.begin == pytest.approx(0.0042, abs=1e-3)
    for one, then in pairwise((*line.prefill, *line.link)):
        assert one.end <= then.begin + 1e-9, "bars overlap"
    assert "waits 0.01 to 32.12 s" in line.text
    assert "waits at prefill" in picture([line], "Queued", "Recorded")


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        (SERIAL[1:], "router's"),
        ([*SERIAL[:2], *SERIAL[3:]], "prefill engine's"),
        (SERIAL[:4], "handoff's"),
        ([*SERIAL[:4], replace(SERIAL[4], attributes={"disagg.outcome": "failed"})], "not loaded"),
    ],
)
def test_a_trace_that_is_not_whole_is_an_error(spans: list[Span], problem: str) -> None:
    with pytest.raises(DisaggError, match=problem):
        timeline(spans, "broken")


def test_a_picture_of_two_requests() -> None:
    lines = [timeline(SERIAL, "a < b"), timeline(STREAMED, "streamed")]
    text = picture(lines, "One & the other", "Measured somewhere")
    assert text == picture(lines, "One & the other", "Measured somewhere")
    root = ElementTree.fromstring(text)
    name = {"svg": "http://www.w3.org/2000/svg"}
    assert root.find("svg:title", name) is not None
    said = (root.findtext("svg:desc", "", name), root.findtext("svg:title", "", name))
    assert "a < b: waits 0.10 to 0.20 s, prefill computes 0.20 to 4.00 s" in said[0]
    assert said[1] == "One & the other"
    wide = float(root.attrib["viewBox"].split()[2])
    drawn = [one for one in root.iter("{http://www.w3.org/2000/svg}rect") if len(one)]
    assert len(drawn) == len(bars(lines[0])) + len(bars(lines[1]))
    assert all(float(one.attrib["x"]) + float(one.attrib["width"]) < wide for one in drawn)
    assert set(re.findall(r"var\(--(\w+)\)", text)) == {
        "back", "c0", "c1", "c2", "c3", "c6", "grid", "text",
    }  # fmt: skip
