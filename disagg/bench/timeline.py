"""Draws one request on a time axis, from the spans of its trace: where it waits, what prefill
computes, what is on the link meanwhile, and the first token.

It needs no matplotlib. The same spans always give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal

from disagg.bench.drawing import FONT, css
from disagg.errors import DisaggError

Kind = Literal["queue", "prefill", "hidden", "chunk", "decode"]

KINDS: Mapping[Kind, tuple[str, str]] = {
    "queue": ("c6", "waits"),
    "prefill": ("c0", "prefill computes"),
    "hidden": ("c2", "KV on the link, hidden"),
    "chunk": ("c1", "KV on the link, not hidden"),
    "decode": ("c3", "decode's first step"),
}
"""The colour of each, and what it is."""
_WIDE, _LEFT, _RIGHT = 900, 96, 24
_TITLE, _LANE, _GAP, _BETWEEN, _AXIS, _LEGEND = 30, 28, 6, 22, 34, 26
_LETTER = 7.0  # of 12 px, about
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_MOST_TICKS = 10
_SHORTEST_WAIT_S = 0.001


@dataclass(frozen=True)
class Event:
    """Of a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """As an exporter sends it."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: Sequence[Event] = ()


@dataclass(frozen=True)
class Bar:
    """Seconds since the request came. text: in it, if there is room."""

    kind: Kind
    begin: float
    end: float
    text: str


@dataclass(frozen=True)
class Timeline:
    """One request. computed_s: when prefill had computed the prompt. hidden: share of the bytes."""

    title: str
    prefill: Sequence[Bar]
    link: Sequence[Bar]
    computed_s: float
    first_s: float
    hidden: float

    @property
    def text(self) -> str:
        """All figures in words, for those who cannot see the picture."""
        said = ", ".join(
            f"{KINDS[bar.kind][1]} {bar.begin:.2f} to {bar.end:.2f} s"
            for bar in (*self.prefill, *self.link)
        )
        return f"{self.title}: {said}. {self.summary}."

    @property
    def summary(self) -> str:
        """Its outcome."""
        hidden = f"; {self.hidden:.0%} of the bytes hidden" if self.hidden else ""
        return f"first token after {self.first_s:.2f} s{hidden}"


def timeline(spans: Sequence[Span], title: str) -> Timeline:
    """Of the spans of one request that was handed off: the router's, vLLM's and the handoff's.
    Raises `DisaggError` if one is missing."""
    asked = _one(spans, lambda span: "disagg.first_byte_ms" in span.attributes, "router's")
    prefill = _one(spans, lambda span: _is_of(span, prefill=True), "prefill engine's")
    decode = _one(spans, lambda span: _is_of(span, prefill=False), "decode engine's")
    handoff = _one(spans, lambda span: span.name == "handoff", "handoff's")
    if handoff.attributes.get("disagg.outcome") != "loaded":
        raise DisaggError(f"the handoff was not loaded: {dict(handoff.attributes)}")

    def at(ns: float) -> float:
        return (ns - asked.begin_ns) / 1e9

    computed = at(prefill.begin_ns) + prefill.attributes["gen_ai.latency.time_to_first_token"]
    begun = computed - prefill.attributes["gen_ai.latency.time_in_model_prefill"]
    steps = [one for span in spans if span.name == "growing lease" for one in span.events]
    last = max((one.attributes["disagg.epoch"] for one in steps), default=0)
    ends = [at(one.at_ns) for one in steps if one.attributes["disagg.epoch"] == last]
    queued = asked.attributes.get("disagg.queued_ms", 0.0) / 1000
    # vLLM's own time in the queue begins when the engine's loop takes the request: after its step.
    bars = [*_waits("router", 0.0, queued), *_waits("prefill", at(prefill.begin_ns), begun)]
    bars += [
        Bar("prefill", begin, end, str(number) if ends else "the whole prompt")
        for number, (begin, end) in enumerate(pairwise([begun, *ends, computed]), 1)
    ]
    first = asked.attributes["disagg.first_byte_ms"] / 1000
    chunks = list(_chunks(handoff, at))
    fetched = min([at(handoff.begin_ns), *(one.begin for one in chunks)])
    link = [*_waits("decode", at(decode.begin_ns), fetched), *chunks]
    if chunks:
        link.append(Bar("decode", link[-1].end, first, "decode"))
    hidden = handoff.attributes.get("disagg.hidden_bytes", 0) / handoff.attributes["disagg.bytes"]
    return Timeline(title, bars, link, computed, first, hidden)


def _one(spans: Sequence[Span], is_it: Any, whose: str) -> Span:
    found = [span for span in spans if is_it(span)]
    if len(found) != 1:
        raise DisaggError(f"the trace has {len(found)} spans that may be the {whose}")
    return found[0]


def _is_of(span: Span, *, prefill: bool) -> bool:
    """Whether it is vLLM's span of this leg: prefill's computes one token."""
    tokens = span.attributes.get("gen_ai.request.max_tokens")
    return span.name == "llm_request" and (tokens == 1) is prefill


def _waits(where: str, begin: float, end: float) -> Iterator[Bar]:
    """The wait there, if it is long enough to be seen in words."""
    if end - begin >= _SHORTEST_WAIT_S:
        yield Bar("queue", begin, end, f"waits at {where}")


def _chunks(handoff: Span, at: Any) -> Iterator[Bar]:
    events = sorted(handoff.events, key=lambda one: one.at_ns)
    whole = next((one.at_ns for one in events if one.name == "whole"), 0)
    for one in events:
        if one.name == "chunk":
            kind: Kind = "hidden" if one.at_ns < whole else "chunk"
            end, size = at(one.at_ns), one.attributes["disagg.bytes"]
            yield Bar(kind, end - one.attributes["disagg.seconds"], end, f"{size / 1e6:.0f} MB")


# ---- the picture -------------------------------------------------------------------------------


def picture(lines: Sequence[Timeline], title: str, caption: str) -> str:
    """An SVG file of several requests below each other, on one axis, with its colours in it."""
    longest = max(line.first_s for line in lines) * 1.04
    scale = (_WIDE - _LEFT - _RIGHT) / longest
    one_high = _TITLE + 2 * (_LANE + _GAP) + _BETWEEN
    high = _LEGEND + one_high * len(lines) + _AXIS + _LEGEND - _BETWEEN
    parts = list(_legend())
    bottom = _LEGEND + one_high * len(lines) - _BETWEEN + _GAP
    parts += _axis(longest, scale, bottom)
    for number, line in enumerate(lines):
        parts += _request(line, scale, _LEGEND + number * one_high)
    parts.append(_text(8, high - 10, caption, size=11))
    said = " ".join([*(line.text for line in lines), caption])
    style = f"{css('svg')} svg {{ background: var(--back); font-family: {FONT}; }}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {high}" role="img"'
            f' aria-labelledby="title desc"><title id="title">{escape(title)}</title>'
            f'<desc id="desc">{escape(said)}</desc><style>{style}</style>',
            *parts,
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    x = 8.0
    for colour, name in KINDS.values():
        yield _rect(x, 8, 14, 14, colour)
        yield _text(x + 20, 20, name)
        x += 34 + _LETTER * len(name)


def _axis(longest: float, scale: float, bottom: float) -> Iterator[str]:
    step = next((one for one in _TICKS if longest / one <= _MOST_TICKS), _TICKS[-1])
    for number in range(int(longest / step) + 1):
        x = _LEFT + number * step * scale
        yield _line(x, _LEGEND + _TITLE - 4, x, bottom, "grid")
        yield _text(x, bottom + 16, f"{number * step:g} s", anchor="middle")


def _request(line: Timeline, scale: float, top: float) -> Iterator[str]:
    yield _text(8, top + 20, f"{line.title}: {line.summary}", size=13, bold=True)
    lanes = (("prefill", line.prefill), ("link, decode", line.link))
    for number, (name, bars) in enumerate(lanes):
        y = top + _TITLE + number * (_LANE + _GAP)
        yield _text(8, y + _LANE / 2 + 4, name)
        for bar in bars:
            x, wide = _LEFT + bar.begin * scale, max(1.0, (bar.end - bar.begin) * scale)
            colour, what = KINDS[bar.kind]
            said = f"{what}: {bar.begin:.3f} to {bar.end:.3f} s, {bar.text}"
            yield _rect(x, y, wide, _LANE, colour, said)
            if wide > _LETTER * len(bar.text) + 4:
                yield _text(x + wide / 2, y + _LANE / 2 + 4, bar.text, "back", anchor="middle")
    ends = top + _TITLE + 2 * (_LANE + _GAP)
    computed, first = (_LEFT + seconds * scale for seconds in (line.computed_s, line.first_s))
    yield _line(computed, top + _TITLE - 4, computed, ends, "text", "3 3")
    yield _line(first, top + _TITLE - 4, first, ends, "text", width=2.5)


def _rect(x: float, y: float, wide: float, high: float, colour: str, said: str = "") -> str:
    inside = f"<title>{escape(said)}</title>" if said else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:g}" '
        f'style="fill: var(--{colour}); stroke: var(--back)">{inside}</rect>'
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "", width: float = 1.0
) -> str:
    style = f"stroke: var(--{colour}); stroke-width: {width:g}"
    style += f"; stroke-dasharray: {dash}" if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" style="{style}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    colour: str = "text",
    *,
    anchor: str = "start",
    size: int = 12,
    bold: bool = False,
) -> str:
    weight = "; font-weight: 600" if bold else ""
    style = f"fill: var(--{colour}); font-size: {size}px{weight}; text-anchor: {anchor}"
    return f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{escape(text)}</text>'
