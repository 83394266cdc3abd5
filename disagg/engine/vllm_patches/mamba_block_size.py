"""Lets CPU engines keep recurrent state for whole blocks as it is behind their last token.

With prefix caching, vLLM has a step end where a block of states ends, or has the layer store the
state from within the step. On a CPU vLLM 0.32 does neither. After it has found how long blocks must
be for one state to fit, its engine process reads its config anew and takes 128 tokens again, so a
step goes over a block's end, and the state behind some later token stays under the block's hash:
whoever has that prefix answers wrong. And what stores a state from within a step is for GPUs alone:
the engine dies.

Must never change an engine on GPUs, nor one whose blocks the user has sized.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from disagg.engine.vllm_patches import patching

Update = Callable[[Any], None]
Specs = Callable[[Any], dict[str, Any]]


def install() -> None:
    """In each process of vLLM's."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    platform.check_and_update_config = staticmethod(
        keeping_blocks(platform.check_and_update_config)
    )
    patching.in_cpu_workers(_mend)


def keeping_blocks(update: Update) -> Update:
    """vLLM's reading of a config, of which blocks that are allocated already keep their size."""
    if hasattr(update, "keeps_blocks"):
        return update  # plugins may be loaded twice

    @functools.wraps(update)
    def keeps_blocks(config: Any) -> None:
        cache = config.cache_config
        allocated = cache is not None and cache.num_gpu_blocks is not None
        tokens = cache.block_size if allocated else None
        update(config)
        if allocated:
            cache.block_size = tokens

    keeps_blocks.keeps_blocks = True  # type: ignore[attr-defined]
    return keeps_blocks


def _mend() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    specs: Specs = CPUModelRunner.get_kv_cache_spec
    CPUModelRunner.get_kv_cache_spec = between_steps(specs)  # type: ignore[assignment]


def between_steps(specs: Specs) -> Specs:
    """What vLLM's model runner says of its layers, none of which stores a state within a step."""
    if hasattr(specs, "is_between_steps"):
        return specs

    @functools.wraps(specs)
    def is_between_steps(runner: Any) -> dict[str, Any]:
        from vllm.v1.kv_cache_interface import MambaSpec

        return {
            layer: replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
            if isinstance(spec, MambaSpec)
            else spec
            for layer, spec in specs(runner).items()
        }

    is_between_steps.is_between_steps = True  # type: ignore[attr-defined]
    return is_between_steps
