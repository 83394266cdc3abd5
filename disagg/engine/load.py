"""An engine's current load, from the metrics of its own process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import REGISTRY

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_KV_USAGE, _LEASES = "vllm:kv_cache_usage_perc", "disagg_leases_held"


@dataclass(frozen=True)
class EngineLoad:
    """running, waiting: requests. kv_usage: used share of the KV cache, 0 to 1. leases: finished
    prompts whose blocks a decode engine has yet to fetch."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    leases: int = 0

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return self.running + self.waiting

    @property
    def idle(self) -> bool:
        """Whether the engine has neither requests nor leases."""
        return not (self.requests or self.leases)


def current() -> EngineLoad:
    """The load of the engine whose API server runs in this process."""
    return EngineLoad(
        running=int(sum(_values(_RUNNING))),
        waiting=int(sum(_values(_WAITING))),
        kv_usage=max(_values(_KV_USAGE), default=0.0),
        leases=int(sum(_values(_LEASES))),
    )


def _values(name: str) -> Sequence[float]:
    # One family only: an engine has thousands of series.
    families = REGISTRY.restricted_registry([name]).collect()
    return [sample.value for family in families for sample in family.samples]
