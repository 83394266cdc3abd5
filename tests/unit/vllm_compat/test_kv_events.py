"""Where an engine says that it publishes KV events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from disagg.vllm_compat.kv_events import kv_event_addresses


def told(**source: Any) -> Any:
    return SimpleNamespace(**{"publisher": "zmq", "replay_endpoint": None, **source})


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([], None),
        ([told(endpoint="tcp://10.0.0.1:5")], ("tcp://10.0.0.1:5", None)),
        (
            [told(endpoint="tcp://[::1]:5", replay_endpoint="tcp://[::1]:6")],
            ("tcp://[::1]:5", "tcp://[::1]:6"),
        ),
        ([told(endpoint="tcp://*:5557")], None),
        ([told(endpoint="ipc:///tmp/x")], ("ipc:///tmp/x", None)),
        ([told(endpoint="inproc://x")], None),
        ([told(endpoint="tcp://10.0.0.1:5", publisher="null")], None),
    ],
)
def test_addresses(sources: list[Any], expected: tuple[str, str | None] | None) -> None:
    engine = SimpleNamespace(get_kv_event_sources=lambda: dict(enumerate(sources)))
    assert kv_event_addresses(cast(Any, engine)) == expected


def test_a_vllm_that_does_not_tell() -> None:
    assert kv_event_addresses(cast(Any, SimpleNamespace())) is None
