"""Mends CPU engines for requests with a seed whose prompt takes several steps.

Each step draws a token for each request, also for a prompt that is not at its end. vLLM then
rewinds the request's generator. A generator on a CPU cannot be rewound, so one such request ends
the engine, and each engine that it is tried on. With this patch such requests draw from the common
generator in these steps, whose tokens are thrown away. Their own generator stays as it was.

Must never change an engine on GPUs, nor what any request draws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from disagg.engine.vllm_patches.patching import Patch, on_cpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Sample = Callable[..., Any]


def spare_generators() -> None:
    """Change how vLLM's CPU model runner samples."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample: Sample = CPUModelRunner.sample_tokens
    CPUModelRunner.sample_tokens = apart(sample)  # type: ignore[assignment]


def apart(sample: Sample) -> Sample:
    """vLLM's sampling of one step, without the generators of requests whose token is dropped."""
    if hasattr(sample, "is_apart"):
        return sample

    @functools.wraps(sample)
    def is_apart(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        thrown_away = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        kept = {row: batch.generators.pop(row) for row in thrown_away if row in batch.generators}
        try:
            return sample(runner, *args, **kwargs)
        finally:
            batch.generators.update(kept)

    is_apart.is_apart = True  # type: ignore[attr-defined]
    return is_apart


def _is_needed(config: VllmConfig) -> bool:
    return config.device_config.device_type == "cpu"  # any client may send a seed


PATCH = Patch(
    "seeded_chunked_prefill",
    fault="one request with a seed and a prompt of several steps ends a CPU engine.",
    versions=">=0.29,<0.33",
    report="none that we know of for vLLM; the same fault of a fork of its runner: "
    "https://github.com/RBLN-SW/vllm-rbln/pull/1025",
    until="vLLM's CPU model runner does not rewind generators",
    apply=spare_generators,
    when=on_cpu,
    needed=_is_needed,
    in_workers=True,
)
