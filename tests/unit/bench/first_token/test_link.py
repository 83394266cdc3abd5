"""`disagg bench handoff --link`: what its options ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.bench.first_token.link import LinkPlan, plan
from disagg.errors import ConfigError


def planned(link: str | None = "auto", **more: Any) -> LinkPlan:
    options: dict[str, Any] = {"steps": (), "lengths": (), "repeats": 3}
    options |= {"transport": None, "peers": (), "storage": Path("/dev/shm")}
    return plan(link, **options | more)


def test_what_is_not_given() -> None:
    made = planned()
    assert (made.steps, made.tokens, made.bytes) == ((4, 16), 4096, 128 << 20)
    assert (made.transport, made.paced, made.rate) == ("tcp", True, None)


def test_steps_alone_mean_auto_over_tcp_and_no_link_over_others() -> None:
    assert planned(None, steps=[2]).paced
    assert planned(None, steps=[2]).rate is None
    assert not planned(None, steps=[2], transport="shared_storage").paced


def test_a_rate() -> None:
    assert planned("25Gbit").rate == 25 * 10**9
    assert planned("100Mbit", lengths=[2048], steps=[1, 16]).tokens == 2048


@pytest.mark.parametrize(
    ("link", "more", "problem"),
    [
        ("fast", {}, "--link: fast — not a rate, such as 25Gbit or 400Mbit, and not auto"),
        ("1Mbit", {}, "--link: 4096 tokens would take 1074 s; at most 20 s"),
        ("auto", {"transport": "shared_storage"}, "--link: shared_storage does not cross it"),
        ("auto", {"steps": [4, 64]}, "--steps: 64 — 4096 tokens in 64 steps are not whole blocks"),
        ("auto", {"steps": [0]}, "--steps: 0"),
        ("auto", {"lengths": [100]}, "--lengths: 100 — 128 to 16256 tokens"),
        ("auto", {"lengths": [4096, 8192]}, "--lengths: one length with --link or --steps"),
        ("auto", {"peers": ["lmcache"]}, "--peers: lmcache — one of example, nixl, nixl-push"),
    ],
)
def test_what_makes_no_sense(link: str, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        planned(link, **more)
    assert problem in str(raised.value)
