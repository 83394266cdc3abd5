"""What `/metrics` says of the router itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge
from unit.router.conftest import Setup

from disagg import __version__
from disagg.router.server.peer_processes import merged_metrics
from disagg.router.telemetry.engine_metrics import usable_lines
from disagg.router.telemetry.metrics import RouterMetrics, text_of
from disagg.testing.http import client

BUILD = f'disagg_build_info{{version="{__version__}"}} 1.0'


def test_the_build_and_no_times_of_creation(setup: Setup) -> None:
    client().post(f"{setup.url}/v1/completions", json={"model": "m", "prompt": "x"})
    text = client().get(f"{setup.url}/metrics").text
    assert BUILD in text.splitlines()
    assert "disagg_router_requests_total{" in text
    assert "_created" not in text


def test_the_build_of_several_processes() -> None:
    own = text_of(RouterMetrics().registry).decode()
    lines = merged_metrics({0: own, 1: own}).decode().splitlines()
    for process in "01":
        assert BUILD.replace("{", f'{{process="{process}",') in lines
    assert not [line for line in lines if "_created" in line]


def test_a_family_that_ends_like_a_time_of_creation_stays() -> None:
    registry = CollectorRegistry()
    Gauge("engines_created", "Engines.", registry=registry).set(3)
    Counter("requests", "Requests.", registry=registry).inc()
    lines = text_of(registry).decode().splitlines()
    assert [line for line in lines if line[0] != "#"] == [
        "engines_created 3.0",
        "requests_total 1.0",
    ]


def test_an_engine_does_not_say_which_build_the_router_is() -> None:
    assert list(usable_lines('disagg_build_info{version="evil"} 1.0\n')) == []
