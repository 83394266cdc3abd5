"""`disagg bench handoff --link`: what its options ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.bench.first_token.link import Bench, LinkPlan, cause, plan
from disagg.bench.first_token.link_engines import carry
from disagg.bench.first_token.pairs import example
from disagg.errors import ConfigError, StartupError
from disagg.testing import network
from disagg.testing.network import Link

WHY_NOT = network.why_not()
real = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


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


@real
def test_a_handoff_that_took_another_way_is_no_measurement(tmp_path: Path) -> None:
    made = planned(lengths=[256], steps=[1])
    with Link() as link:
        bench = Bench(made, link, tmp_path, Console())
        before = link.sent(0)
        with pytest.raises(StartupError, match=r"only 0\.0 of 8\.4 MB of NixlConnector's handoff"):
            bench._require_crossed("nixl", before)
        carry(link, made.bytes)
        bench._require_crossed("nixl", before)


@real
def test_a_folder_crosses_no_link(tmp_path: Path) -> None:
    """ExampleConnector is left out in words, and not started."""
    console = Console(record=True, width=200)
    with Link() as link:
        bench = Bench(planned(peers=["example"]), link, tmp_path, console)
        bench._through_a_folder(example(tmp_path))
    assert [(one.connector, one.steps) for one in bench.missing] == [("example", None)]
    assert "ExampleConnector: not measured: it hands over through a folder" in console.export_text()


def test_the_cause_is_the_last_error_of_the_log() -> None:
    log = "ValueError: first\n(Worker) nixlBackendError: NIXL_ERR_BACKEND\nexited\n"
    error = StartupError("nixl prefill ended while starting", log)
    assert cause(error) == "nixl prefill ended while starting; nixlBackendError: NIXL_ERR_BACKEND"
    assert cause(StartupError("it was not ready", "all well")) == "it was not ready"
