"""Our connectors' metrics in classes that are not prometheus_client's: vLLM has some for Ray."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from disagg.connector.handoff.metrics import ConnectorPromMetrics
from disagg.connector.hidden_states.metrics import HiddenStatesPromMetrics
from disagg.connector.offload.metrics import OffloadPromMetrics


class Kind:
    """Takes what vLLM's wrappers for Ray take, and is no subclass of what it stands for."""

    def __init__(self, of: Any, registry: CollectorRegistry) -> None:
        self._of, self._registry = of, registry

    def __call__(
        self, name: str, documentation: str, labelnames: Sequence[str], **buckets: Any
    ) -> Any:
        return self._of(name, documentation, labelnames, registry=self._registry, **buckets)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def made(of: Any, registry: CollectorRegistry) -> Any:
    kinds = {kind: Kind(kind, registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=object())
    return of(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})


@pytest.mark.parametrize("of", [OffloadPromMetrics, HiddenStatesPromMetrics])
def test_other_classes_will_do(of: Any, registry: CollectorRegistry) -> None:
    made(of, registry)
    assert list(registry.collect())


def test_what_is_seen_is_shown(registry: CollectorRegistry) -> None:
    made(ConnectorPromMetrics, registry).observe(
        {
            "handoffs": {"tcp|loaded": 2},
            "bytes": {"tcp": 4096},
            "seconds": [0.25],
            "failures": {"deadline": 1},
            "leases": {"fetched": 3},
            "leases_held": 4,
        }
    )
    for name, labels, value in (
        ("disagg_handoffs_total", {"transport": "tcp", "outcome": "loaded"}, 2),
        ("disagg_handoff_bytes_total", {"transport": "tcp"}, 4096),
        ("disagg_handoff_seconds_sum", {}, 0.25),
        ("disagg_kv_load_failures_total", {"reason": "deadline"}, 1),
        ("disagg_leases_total", {"outcome": "fetched"}, 3),
        ("disagg_leases_held", {}, 4),
    ):
        assert (
            registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels}) == value
        )
