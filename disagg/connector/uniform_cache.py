"""One buffer for the KV caches of all layers, in which a block's bytes of all layers are adjacent.

For caches that are allocated outside vLLM's engine. The conditions are vLLM's for a layout across
layers: the connector requests it, all layers are one group with pages of one size, and every
attention backend reads such a layout. Each layer gets a view with vLLM's logical shape, so its
readers need not know the layout. It never copies, and never changes the given configs.

Legend: L layers, B blocks, H KV heads, N tokens of a block, C content (K and V of one head and
token).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    compute_layer_kv_cache_shape_bytes,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg.vllm_compat.kv_cache import (
    block_stride_alignment,
    has_layer_views,
    kernel_block_size,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.attention.backend import AttentionBackend


@dataclass(frozen=True)
class UniformCache:
    """`whole`: all bytes, its axes in the layout's physical order, as [B, L, H, N, C] in BLHNC.

    `layers`: by name, [B, H, N, C] views of it. `config`: says where in it each layer lies.
    """

    whole: torch.Tensor
    layers: dict[str, torch.Tensor]
    layout: KVCacheLayout
    config: KVCacheConfig


def uniform_layout(
    connector: KVConnectorBase_V1,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    backends: Sequence[type[AttentionBackend]],
) -> KVCacheLayout | None:
    """The layout across layers that this cache is to have, or None for one buffer per layer.

    Connectors ask by `get_required_kvcache_layout`; those written for vLLM before 0.32, by a true
    `prefer_cross_layer_blocks`, which leaves the choice to the backends. backends: of all layers.
    """
    if _uniform_spec(kv_cache_config, backends) is None:
        return None
    readable = get_supported_kv_cache_layouts(backends)
    resolved = vllm_config.cache_config.kv_cache_layout
    candidates = [
        layout
        for layout in readable
        if layout.is_block_outermost and resolved in (None, layout.name)
    ]
    required = type(connector).get_required_kvcache_layout(vllm_config)
    if required is not None:
        return next((layout for layout in candidates if layout.name == required), None)
    if getattr(connector, "prefer_cross_layer_blocks", False):
        return next(iter(candidates), None)
    return None


def allocate_uniform(
    kv_cache_config: KVCacheConfig,
    layout: KVCacheLayout,
    device: torch.device,
    shared_layers: Mapping[str, str] | None = None,
) -> UniformCache:
    """Allocate one zeroed buffer and view it per layer.

    shared_layers: layers without a cache of their own, and whose cache each one reads. Raises
    `ValueError` for a cache that is no single group with dense pages of one size, and for layouts
    in which blocks are not outermost.
    """
    spec = _uniform_spec(kv_cache_config)
    if spec is None or not layout.is_block_outermost:
        raise ValueError(f"{layout.name}: this cache cannot be laid out across its layers")
    names = [name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers]
    page = compute_layer_kv_cache_shape_bytes(spec, kv_cache_config.num_blocks)
    logical = (len(names), *page[:-1], page[-1] // spec.dtype.itemsize)
    raw = torch.zeros(len(names) * math.prod(page), dtype=torch.int8, device=device)
    whole = raw.view(spec.dtype).view([logical[axis] for axis in layout.stride_order])
    by_layer = whole.permute([layout.stride_order.index(axis) for axis in range(len(logical))])
    layers = dict(zip(names, by_layer, strict=True))
    layers.update({name: layers[target] for name, target in (shared_layers or {}).items()})
    placement = KVCacheTensor(
        size=raw.numel(),
        layers=names,
        layer_stride=by_layer.stride(0) * spec.dtype.itemsize,
        block_stride=by_layer.stride(1) * spec.dtype.itemsize,
    )
    config = replace(kv_cache_config, kv_cache_tensors=[placement], kv_cache_layout=layout.name)
    return UniformCache(whole, layers, layout, config)


def _uniform_spec(
    kv_cache_config: KVCacheConfig, backends: Sequence[type[AttentionBackend]] = ()
) -> AttentionSpec | None:
    """The spec that all layers share, if their pages can be adjacent without gaps."""
    if len(kv_cache_config.kv_cache_groups) != 1 or not kv_cache_config.kv_cache_tensors:
        return None
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    if not isinstance(spec, AttentionSpec) or not has_layer_views(spec):
        return None
    if spec.page_size_bytes != spec.unpadded_page_size_bytes:
        return None
    layers = sum(len(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors)
    if layers * spec.page_size_bytes % block_stride_alignment(spec):
        return None
    # Between two blocks of a layer lie other layers, so kernels cannot read a block in pieces.
    return spec if kernel_block_size(spec, backends) == spec.block_size else None
