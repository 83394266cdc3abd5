"""Only well-formed lines of known families are used, and readings are shared."""

from __future__ import annotations

import asyncio

import pytest

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
