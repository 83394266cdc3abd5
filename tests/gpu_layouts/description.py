"""What an engine registers with a connector, as plain data: a real engine's, or a computed one's.

`RecordingConnector` writes it in a real engine; `python -m gpu_layouts.computed` without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

RECORD = "DISAGG_TEST_RECORD"
"""The environment variable that names the file of a `RecordingConnector`."""

Description = dict[str, Any]


def described(config: Any, cache: Any, caches: Mapping[str, torch.Tensor]) -> Description:
    """JSON's types alone. config, cache: vLLM's `VllmConfig` and `KVCacheConfig`, of a worker.
    caches: the tensors by layer.

    Of each layer: its attention backend, its tensor's dtype, shape, strides and offset in bytes,
    and the number and size of the allocation that holds it, as several layers may share one.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    kind: Any = AttentionLayerBase
    layers = get_layers_from_vllm_config(config, kind)
    allocations: dict[int, int] = {}
    return {
        "layout": str(cache.kv_cache_layout),
        "blocks": int(cache.num_blocks),
        "groups": [
            {
                "layers": sorted(group.layer_names),
                "spec": type(group.kv_cache_spec).__name__,
                "block_size": int(group.kv_cache_spec.block_size),
                "page_bytes": int(group.kv_cache_spec.page_size_bytes),
            }
            for group in cache.kv_cache_groups
        ],
        "layers": {
            name: {
                "backend": layers[name].get_attn_backend().get_name(),
                **_tensor(caches[name], allocations),
            }
            for name in sorted(caches)
        },
    }


def _tensor(tensor: torch.Tensor, allocations: dict[int, int]) -> Description:
    storage = tensor.untyped_storage()
    return {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": tensor.storage_offset() * tensor.element_size(),
        "allocation": allocations.setdefault(storage.data_ptr(), len(allocations)),
        "allocation_bytes": storage.nbytes(),
    }
