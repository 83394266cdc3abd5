"""Only well-formed lines of known families are used, and readings are shared."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from unit.router.conftest import Loop, wait_for
from unit.router.scripted import Script, ScriptedEngine, routed

from disagg.router.telemetry.engine_metrics import Cached, samples, usable_lines

GOOD = [
    "# TYPE disagg_leases_held gauge",
    'disagg_leases_held{engine="0"} 2.0',
    'disagg_handoffs_total{outcome="loaded",transport="tcp"} 1e+06',
    'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="org/m-1.5"} 3.0',
    "disagg_handoff_seconds_sum 0.5",
    "disagg_a_total NaN",
]


@pytest.mark.parametrize("line", GOOD)
def test_a_usable_line(line: str) -> None:
    assert list(usable_lines(f"x\n{line}\n")) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "# HELP disagg_leases_held words of an engine",
        "# TYPE disagg_leases_held evil",
        'disagg_leases_held{engine="two words"} 2.0',
        'disagg_leases_held{engine="a\\"b"} 2.0',
        'disagg_leases_held{engine="a',
        'disagg_leases_held{engine="0"} 2.0 17',
        'disagg_leases_held{engine="0"} two',
        "disagg_leases_held",
        "disagg_leases_held 1\r",
        'disagg_x{a="' + "b" * 129 + '"} 1',
        "disagg_router_requests_total 1",
        "# TYPE disagg_router_requests counter",
        "vllm:other 1.0",
        "python_info 1.0",
    ],
)
def test_a_line_that_is_left_out(line: str) -> None:
    assert list(usable_lines(f"{line}\n{GOOD[1]}")) == [GOOD[1]]


def test_an_engine_has_a_bounded_number_of_lines() -> None:
    text = "".join(f"disagg_n{number} 1\n" for number in range(10_000))
    assert len(list(usable_lines(text))) == 4096


def test_samples() -> None:
    found = list(
        samples("\n".join([*GOOD, "disagg_leases_held{ 1"]), ("disagg_leases", "disagg_h"))
    )
    assert found == [
        ("disagg_leases_held", {"engine": "0"}, 2.0),
        ("disagg_handoffs_total", {"outcome": "loaded", "transport": "tcp"}, 1e6),
        ("disagg_handoff_seconds_sum", {}, 0.5),
    ]


def test_readers_share_a_value() -> None:
    made = []

    async def make() -> int:
        await asyncio.sleep(0.02)
        made.append(1)
        return len(made)

    async def scene() -> None:
        cached = Cached(make)
        assert await asyncio.gather(*(cached.get("a") for _ in range(9))) == [1] * 9
        assert await cached.get("b") == 2
        assert await cached.get("b", fresh=True) == 3
        assert await cached.get("b") == 3

    asyncio.run(scene())


FIGURES = b"# TYPE disagg_leases_held gauge\ndisagg_leases_held 2\n"
COUNTS = b'disagg_handoffs_total{outcome="loaded",transport="tcp"} 4'
HTML = b"<!doctype html><html><body>disagg_leases_held 1</body></html>"


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        (HTML, b"text/html", "content_type"),
        (HTML, b"text/plain", "content_type"),
        (b'{"disagg_leases_held": 1}', b"application/json", "content_type"),
        (b'{"disagg_leases_held": 1}', b"text/plain", "content_type"),
        (FIGURES + b"disagg_x \xff\n", b"text/plain", "encoding"),
        (FIGURES + b"\n" * (17 << 20), b"text/plain", "size"),
        (b"disagg_leases_held two\n", b"text/plain", "line"),
        (b"disagg_leases_held 1.2.3\n", b"text/plain", "line"),
        (b'disagg_leases_held{a="1",a="2"} 1\n', b"text/plain", "line"),
        (b'disagg_leases_held{a="1"', b"text/plain", "line"),
        (b"disagg_leases_held 1\ndisagg_leases_held 2\n", b"text/plain", "contradiction"),
        (FIGURES + b"# TYPE disagg_leases_held counter\n", b"text/plain", "contradiction"),
        (b"# TYPE disagg_leases_held counter\ndisagg_leases_held_total 1\n", b"text/plain", None),
        (b"disagg_leases_held NaN\n", b"text/plain", None),
        (b"vllm:num_requests_running +Inf\n", b"text/plain", None),
    ],
)
def test_odd_metrics_cost_one_engine_its_figures(
    loop: Loop, text: bytes, kind: bytes, problem: str | None
) -> None:
    """The other engines keep theirs, in both documents, and the odd one is counted."""
    odd = ScriptedEngine("decode", Script(metrics=text, metrics_type=kind))
    good = [ScriptedEngine("decode", Script(metrics=FIGURES)) for _ in range(2)]
    with routed(loop, [odd, *good]) as url:
        shown = httpx.get(f"{url}/metrics").text
        counted = httpx.get(f"{url}/metrics").text  # the own figures come before the engines'
        state = httpx.get(f"{url}/ui/state").json()
    for name in ("decode-1", "decode-2"):
        assert f'disagg_leases_held{{engine="{name}",role="decode"}} 2.0' in shown
    assert "# TYPE disagg_leases_held gauge" in shown
    (held,) = {engine.get("leases") for engine in state["engines"] if engine["name"] != "decode-0"}
    assert held == 2
    found = re.findall(
        r'engine_metrics_problems_total{engine="(.*)",problem="(.*)"} [1-9]', counted
    )
    assert found == ([("decode-0", problem)] if problem else [])


@pytest.mark.parametrize("odd", [HTML, b"[]", b""])
def test_odd_metrics_are_no_lost_handoffs(loop: Loop, odd: bytes) -> None:
    """Counts that are missing for a while are no failures when they come back."""
    failed = b'disagg_handoffs_total{outcome="failed",transport="tcp"} 9'
    script = Script(metrics=failed)
    engines = [ScriptedEngine("prefill", script), ScriptedEngine("decode", script)]
    with routed(loop, engines) as url:
        for text in (failed, odd, failed):
            script.metrics = text
            script.seen.clear()
            assert wait_for(lambda: [p for p, _ in script.seen].count("/metrics") > 2)
        ready = httpx.get(f"{url}/ready")
    assert ready.status_code == 200, ready.text
