"""Speeds with round numbers, and small loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.planning.outcome import Targets
from disagg.planning.simulation import Routing, SimulatedLoad
from disagg.planning.speeds import Speeds
from disagg.planning.trace import Trace

PREFILL = {
    "request_s": 0.004,
    "step_s": 0.01,
    "token_s": 1e-4,
    "token_context_s": 1e-8,
    "max_num_batched_tokens": 1000,
    "max_num_seqs": 8,
}
DECODE = {
    "request_s": 0.003,
    "step_s": 0.02,
    "sequence_s": 0.001,
    "context_token_s": 1e-6,
    "prompt_token_s": 2e-4,
    "prompt_token_context_s": 2e-8,
    "max_num_batched_tokens": 1000,
    "max_num_seqs": 8,
    "kv_tokens": 20_000,
}
HANDOFF = {"latency_s": 0.005, "bytes_per_token": 1000.0, "bytes_per_s": 1e8, "parallel": 2}


def speeds(
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    handoff: dict[str, Any] | None = None,
    router_s: float = 0.001,
) -> Speeds:
    """The speeds above, with these changes."""
    return Speeds.model_validate(
        {
            "measured": {"machine": "none, made up"},
            "prefill": {**PREFILL, **(prefill or {})},
            "decode": {**DECODE, **(decode or {})},
            "handoff": {**HANDOFF, **(handoff or {})},
            "router_s": router_s,
        }
    )


def trace(*requests: tuple[float, int, int]) -> Trace:
    """A trace of requests (at, prompt, output)."""
    at, prompt, output = zip(*requests, strict=True)
    return Trace(at, prompt, output, "made up")


def load(
    requests: Trace | Sequence[tuple[float, int, int]],
    of: Speeds | None = None,
    *,
    targets: Targets | None = None,
    local_prefill_tokens: int = 0,
    routing: Routing | None = None,
    seed: int = 0,
) -> SimulatedLoad:
    """A load of these requests, with targets that every request meets."""
    if not isinstance(requests, Trace):
        requests = trace(*requests)
    targets = targets or Targets(1e9, 1e9, 1.0)
    routing = routing or Routing(local_prefill_tokens)
    return SimulatedLoad(requests, of or speeds(), targets, routing, seed)
