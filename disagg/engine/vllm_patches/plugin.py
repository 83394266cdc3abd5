"""The general plugin that vLLM calls in each of its processes (see pyproject.toml)."""

from __future__ import annotations

from disagg.engine.vllm_patches import (
    busy_poll,
    cpu_experts,
    fork_workers,
    kv_memory_headroom,
    load_failure_policy,
    mamba_block_size,
    mla_rotary,
    patching,
    rejection_sampler,
    seeded_chunked_prefill,
    worker_shutdown,
)

# Switches that `disagg serve` sets in the environment.
SWITCHES = (busy_poll.PATCH, busy_poll.IN_WORKERS, fork_workers.PATCH)
# Functions that our connector needs and for which vLLM has no setting.
EXTENSIONS = (kv_memory_headroom.PATCH, load_failure_policy.PATCH)
# Faults of vLLM.
MENDS = (
    worker_shutdown.PATCH,
    cpu_experts.COLLECTIVES,
    cpu_experts.OWN_EXPERTS,
    seeded_chunked_prefill.PATCH,
    mamba_block_size.BLOCK_SIZE,
    mamba_block_size.CHECKPOINTS,
    mla_rotary.PATCH,
    rejection_sampler.EXPAND,
    rejection_sampler.NO_GUESSES,
)
ALL = (*SWITCHES, *EXTENSIONS, *MENDS)


def install() -> None:
    """Apply each patch that is for this vLLM and this process. Never raises."""
    patching.install(ALL)
