"""What vLLM calls in each of its processes, as a general plugin (see pyproject.toml)."""

from __future__ import annotations

from disagg.engine.vllm_patches import (
    busy_poll,
    fork_workers,
    kv_memory_headroom,
    mamba_block_size,
    mla_rotary,
    seeded_chunked_prefill,
    worker_shutdown,
)


def install() -> None:
    """Do what the environment asks for, have engines leave our connector its memory, and mend
    what keeps vLLM's workers from ending, ends them, or has them answer wrong."""
    busy_poll.install()
    fork_workers.install()
    kv_memory_headroom.install()
    worker_shutdown.install()
    seeded_chunked_prefill.install()
    mamba_block_size.install()
    mla_rotary.install()
