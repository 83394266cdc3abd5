"""Mends CPU engines that keep recurrent state for prefix caching.

The state that is cached for a block must be the state behind the block's last token. So vLLM ends a
step where a block of states ends, or has the layer store the state in the middle of the step. On a
CPU, vLLM does neither right:

- It finds how many tokens a block must have so that one state fits. Then its engine process reads
  the config again and goes back to 128 tokens. A step passes the end of a block, and the state of a
  later token is cached under the block's hash. A request with that prefix gets wrong answers.
- Only GPUs have a kernel that stores a state in the middle of a step. A CPU engine of vLLM 0.32
  dies; before, Mamba2 layers did not ask for it.

Must never change an engine on GPUs, nor one whose block size the user has set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from disagg.engine.vllm_patches.patching import Patch, on_cpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Update = Callable[[Any], None]
Specs = Callable[[Any], dict[str, Any]]


def keep_block_size() -> None:
    """Change how vLLM's CPU platform reads a config, in each process."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.check_and_update_config = staticmethod(
        keeping_blocks(platform.check_and_update_config)
    )


def keeping_blocks(update: Update) -> Update:
    """vLLM's reading of a config. Blocks that are allocated already keep their size."""
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


def store_states_between_steps() -> None:
    """Change the KV cache specs of vLLM's CPU model runner."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    specs: Specs = CPUModelRunner.get_kv_cache_spec
    CPUModelRunner.get_kv_cache_spec = between_steps(specs)  # type: ignore[assignment]


def between_steps(specs: Specs) -> Specs:
    """The runner's KV cache specs; no layer stores a state in the middle of a step."""
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


def _is_needed(config: VllmConfig) -> bool:
    """Whether a CPU engine of a model with recurrent state caches prefixes."""
    is_cpu = config.device_config.device_type == "cpu"
    caches = bool(config.cache_config.enable_prefix_caching)
    return is_cpu and caches and bool(config.model_config.is_hybrid)


_REPORT = (
    "https://github.com/vllm-project/vllm/issues/54504 (mamba_cache_mode all ends CPU engines) and "
    "its open fix https://github.com/vllm-project/vllm/pull/54505; "
    "the lost block size has no report that we know of"
)
BLOCK_SIZE = Patch(
    "mamba_block_size",
    fault="models with recurrent state answer wrong on a CPU to prompts that share a prefix.",
    versions=">=0.29,<0.33",
    report=_REPORT,
    until="vLLM's engine process keeps the block size that it allocated",
    apply=keep_block_size,
    when=on_cpu,
    needed=_is_needed,
)
CHECKPOINTS = Patch(
    "mamba_checkpoints",
    fault="models with Mamba2 layers end the engine on a CPU when a step passes a block's end.",
    versions="==0.32.*",
    report=_REPORT,
    until="vLLM has a CPU kernel that stores states in the middle of a step",
    apply=store_states_between_steps,
    when=on_cpu,
    needed=_is_needed,
    in_workers=True,
)
