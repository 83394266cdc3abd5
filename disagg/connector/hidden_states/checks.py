"""Finds the hidden states in an engine's cache; refuses unsupported engines at start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

METHOD = "extract_hidden_states"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_EXAMPLE = (
    '{"method": "extract_hidden_states", "num_speculative_tokens": 1, '
    '"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}}'
)


@dataclass(frozen=True)
class HiddenStatesGroup:
    """Where the states are. group: the KV cache group. layer_ids: ascending, as in files."""

    group: int
    block_size: int
    layer_ids: tuple[int, ...]


def find_group(config: VllmConfig, kv_cache: KVCacheConfig) -> HiddenStatesGroup:
    """Raises ConfigError with one line per unsupported setting."""
    speculative = config.speculative_config
    if speculative is None or speculative.method != METHOD:
        raise ConfigError(f"speculative_config: must use the method {METHOD}, as in {_EXAMPLE}")
    layer_ids = getattr(speculative.draft_model_config.hf_config, _LAYERS, None) or ()
    if problems := list(_problems(config, layer_ids)):
        raise ConfigError(problems)
    group = _group(kv_cache)
    block_size = kv_cache.kv_cache_groups[group].kv_cache_spec.block_size
    # vLLM returns them in the order of the layers, whatever the order of the setting.
    return HiddenStatesGroup(group, block_size, tuple(sorted(layer_ids)))


def _problems(config: VllmConfig, layer_ids: tuple[int, ...]) -> Iterator[str]:
    layers = config.model_config.get_total_num_hidden_layers()
    wrong = [i for i in layer_ids if not isinstance(i, int) or not 0 <= i <= layers]
    if not layer_ids or wrong or len(set(layer_ids)) < len(layer_ids):
        yield (
            f"speculative_config.draft_model_config.hf_config.{_LAYERS}: {list(layer_ids)} — name "
            f"each layer once, from 0 (the embeddings) to {layers} (the last layer's output)"
        )
    parallel = config.parallel_config
    for setting in ("pipeline_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, setting)
        if size > 1:
            yield f"{setting}: {size} — hidden states need 1; use tensor_parallel_size instead"


def _group(kv_cache: KVCacheConfig) -> int:
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = kv_cache.kv_cache_groups
    found = [
        index
        for index, group in enumerate(groups)
        if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)
    ]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) == 1:
        return 0  # vLLM made one group of all layers, as they need equally many slots
    raise ConfigError(
        f"model: its {len(groups)} KV cache groups do not show where the hidden states are, as "
        "with MLA models; choose another model"
    )
