"""Addresses that engines on one node would share."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from unit.preflight.deployments import deployment_with, problems_of

from disagg.preflight import checks
from disagg.preflight.resolved_plan import resolve


def kv_events(**config: Any) -> dict[str, Any]:
    return {"args": {"kv_events_config": {"enable_kv_cache_events": True, **config}}}


def test_the_plan_shows_the_endpoint_of_each_engine() -> None:
    # Below the range from which the system takes free ports for others.
    given = kv_events(endpoint="tcp://*:15557", replay_endpoint="tcp://*:15558")
    made = deployment_with(engine=given, prefill={"replicas": 2})
    checks.check(made)
    plan = resolve(made)
    assert plan["prefill"]["kv_events"] == {
        "prefill-0": {"endpoint": "tcp://*:15557", "replay_endpoint": "tcp://*:15558"},
        "prefill-1": {"endpoint": "tcp://*:15561", "replay_endpoint": "tcp://*:15562"},
    }
    assert plan["decode"]["kv_events"] == {
        "decode-0": {"endpoint": "tcp://*:15559", "replay_endpoint": "tcp://*:15560"}
    }
    assert "kv_events" not in resolve(deployment_with())["prefill"]


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (
            kv_events(endpoint="tcp://*:15557"),
            kv_events(endpoint="tcp://*:15561"),
            "decode.args.kv_events_config.endpoint: 'tcp://*:15561' — decode-0 and prefill-1 would "
            "both listen on tcp://*:15561; set an address further away",
        ),
        (
            kv_events(endpoint="tcp://*:15557", replay_endpoint="tcp://*:15561"),
            {},
            "prefill.args.kv_events_config.endpoint: 'tcp://*:15557' — prefill-1 and prefill-0 "
            "would both listen on tcp://*:15561; set an address further away",
        ),
        (
            kv_events(endpoint="tcp://*:65533"),
            {},
            "prefill.args.kv_events_config.endpoint: 'tcp://*:65533' — prefill-1 would listen on "
            "tcp://*:65537, and ports end at 65535; set a lower one",
        ),
        (
            kv_events(endpoint="tcp://*"),
            {},
            "prefill.args.kv_events_config.endpoint: 'tcp://*' — prefill-0 would listen on tcp://*,"
            " which has no port; write tcp://*:PORT",
        ),
    ],
)
def test_addresses_that_meet_are_refused(
    prefill: dict[str, Any], decode: dict[str, Any], words: str
) -> None:
    assert problems_of(prefill={"replicas": 2, **prefill}, decode=decode) == [words]


def test_engines_that_autoscaling_may_add_count() -> None:
    pool = {**kv_events(endpoint="tcp://*:65533"), "autoscale": {"max_replicas": 2}}
    (line,) = problems_of(prefill=pool)
    assert "prefill-1 would listen on tcp://*:65537" in line


def test_the_ports_must_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        pool = kv_events(endpoint=f"tcp://*:{port}")
        (line,) = problems_of(decode=pool)
        assert line == (
            f"decode.args.kv_events_config.endpoint: 'tcp://*:{port}' — decode-0 would listen on "
            f"tcp://*:{port}, which is in use; set another port, or 0 for any free one"
        )
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # the engines run elsewhere
        checks.check(deployment_with(decode=pool))


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:0", "tcp://10.0.0.1:15557", "inproc://cache", "ipc:///tmp/kv-events"]
)
def test_addresses_that_are_not_shared_pass(endpoint: str) -> None:
    checks.check(deployment_with(engine=kv_events(endpoint=endpoint), prefill={"replicas": 3}))
