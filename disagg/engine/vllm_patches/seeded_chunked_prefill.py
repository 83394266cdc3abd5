"""Lets CPU engines take requests with a seed whose prompt is computed in several steps.

Each step draws a token for each request, also of a prompt that is not at its end, where vLLM 0.32
then winds the request's generator back. Generators on a CPU cannot be, and the engine dies: of one
request, and of each engine that it is tried on. So such requests draw from the common generator in
these steps, where what they draw counts for nothing, and their own one stays as it was.

Must never change an engine on GPUs, nor what any request draws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from disagg.engine.vllm_patches import patching

Sample = Callable[..., Any]


def install() -> None:
    """In each process of vLLM's that may become a CPU engine's worker."""
    patching.in_cpu_workers(_mend)


def _mend() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample: Sample = CPUModelRunner.sample_tokens
    CPUModelRunner.sample_tokens = apart(sample)  # type: ignore[assignment]


def apart(sample: Sample) -> Sample:
    """vLLM's sampling of one step, without the generators of those whose token is thrown away."""
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
