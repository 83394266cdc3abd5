"""vLLM's description of a KV cache: what its versions call otherwise, or lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from disagg.vllm_compat.differences import (
    ALIGNMENT_IN_BYTES,
    BACKENDS_ALONE_CHOOSE,
    HASHES_BY_CONFIG,
    NO_DRAFT_CACHE_FLAG,
    NO_STRIDE_ALIGNMENT,
    NO_VIEWS_OF_LAYERS,
    PLANNING_MOVED,
)

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
    )


def hash_block_size(config: VllmConfig, kv_cache: KVCacheConfig) -> int:
    """Tokens per block hash of vLLM's."""
    if HASHES_BY_CONFIG.here:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        return int(resolve_kv_cache_block_sizes(kv_cache, config)[1])
    return int(kv_cache.hash_block_size or config.cache_config.block_size)


def uses_draft_kv_cache(speculative: SpeculativeConfig) -> bool:
    """Whether a draft model has KV cache layers of its own."""
    if NO_DRAFT_CACHE_FLAG.here:
        return bool(
            speculative.use_eagle()
            or speculative.uses_draft_model()
            or speculative.uses_extract_hidden_states()
        )
    return bool(speculative.uses_draft_kv_cache())


def has_layer_views(spec: KVCacheSpec) -> bool:
    """Whether each layer has a view of its own into the cache."""
    if NO_VIEWS_OF_LAYERS.here:
        return True
    return bool(spec.has_layer_views)


def block_stride_alignment(spec: KVCacheSpec) -> int:
    """Bytes of which the distance of two blocks must be a multiple."""
    if NO_STRIDE_ALIGNMENT.here:
        return 1
    if ALIGNMENT_IN_BYTES.here:
        alignment: Any = spec.block_stride_alignment
        return int(alignment or 1)
    return int(spec.get_block_stride_alignment())


def kernel_block_size(spec: AttentionSpec, backends: Sequence[type[AttentionBackend]]) -> int:
    """Tokens of the largest kernel blocks that all backends read, and that divide a block."""
    from vllm.v1.worker.utils import select_common_block_size

    if BACKENDS_ALONE_CHOOSE.here:
        return int(select_common_block_size(spec.block_size, list(backends)))
    specs = [spec] * len(backends)
    return int(select_common_block_size(spec.block_size, list(backends), specs))


def config_of_groups(
    config: VllmConfig, groups: list[KVCacheGroupSpec], available_bytes: int
) -> KVCacheConfig:
    """vLLM's own plan of a cache with these groups in that much memory."""
    if PLANNING_MOVED.here:
        from vllm.v1.core.kv_cache_planning import (  # type: ignore[import-not-found, unused-ignore]
            get_kv_cache_config_from_groups,
        )
    else:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    planned: KVCacheConfig = get_kv_cache_config_from_groups(config, groups, available_bytes)
    return planned
