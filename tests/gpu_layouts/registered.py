"""What vLLM's engine on a GPU would give to a connector, computed from a model's config alone.

By vLLM's own functions, in the order in which its engine calls them: the model's layers, their
backends and specs, the block size, the groups, the layout, the tensors. The tensors are in host
memory, of a few blocks.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

BLOCKS = 8
_MEMORY_BYTES = 40 << 30  # the number of blocks is fixed, whatever fits


@dataclass(frozen=True)
class Registered:
    """config: the worker's, and `scheduler_config` the scheduler's, which know other block sizes.
    cache, scheduler_cache: their `KVCacheConfig`. caches: vLLM's tensors by layer. backends: the
    names of the attention backends. kernel_blocks: tokens per block of the kernels, by group."""

    config: Any
    scheduler_config: Any
    cache: Any
    scheduler_cache: Any
    caches: dict[str, torch.Tensor]
    backends: tuple[str, ...]
    kernel_blocks: tuple[int, ...]

    @property
    def layout(self) -> str:
        """vLLM's name of it."""
        return str(self.cache.kv_cache_layout)


def start_parallel_groups() -> None:
    """vLLM's, of this process alone; once per process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        folder = tempfile.mkdtemp()
        method = f"file://{folder}/rendezvous"
        parallel_state.init_distributed_environment(1, 0, method, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)


def registered(
    model: Mapping[str, Any],
    mode: TorchFunctionMode,
    connector: Mapping[str, Any],
    blocks: int = BLOCKS,
    **args: Any,
) -> Registered:
    """model: the content of its `config.json`. connector: vLLM's `kv_transfer_config`. blocks: of
    the cache. args: of vLLM's engine."""
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        config = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=8192,
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(**connector),
            **args,
        ).create_engine_config()
        with set_current_vllm_config(config):
            backends, specs = _layers(config, mode)
            return _cache(config, backends, specs, blocks)


def _layers(config: Any, mode: TorchFunctionMode) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend and the spec of each layer."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"), mode:
        initialize_model(vllm_config=config)
    kind: Any = AttentionLayerBase
    layers = get_layers_from_vllm_config(config, kind)
    type(current_platform).update_block_size_for_backend(config)
    backends = {name: layer.get_attn_backend() for name, layer in layers.items()}
    specs = {}
    for name, layer in layers.items():
        spec = layer.get_kv_cache_spec(config)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(backends[name], spec)
        if spec is not None:
            specs[name] = spec
    return backends, specs


def _cache(
    config: Any, backends: Mapping[str, Any], specs: dict[str, Any], blocks: int
) -> Registered:
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core import single_type_kv_cache_manager as managers
    from vllm.v1.worker import utils

    managers.register_all_kvcache_specs(config)
    readable = get_supported_kv_cache_layouts(dict.fromkeys(backends[name] for name in specs))
    layout = resolve_kv_cache_layout(config, [[one.name for one in readable]], list(specs.values()))
    config.cache_config.num_gpu_blocks_override = blocks
    length, config.model_config.max_model_len = config.model_config.max_model_len, 16
    kv_cache_utils._check_enough_kv_cache_memory = lambda *args, **kwargs: None
    (cache,) = kv_cache_utils.get_kv_cache_configs(config, [copy.copy(specs)], [_MEMORY_BYTES])
    config.model_config.max_model_len = length
    cache.kv_cache_layout = layout.name
    scheduler_cache = kv_cache_utils.generate_scheduler_kv_cache_config([cache])
    scheduler_config = _of_scheduler(config, scheduler_cache)
    _, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(scheduler_cache, scheduler_config)
    cache.hash_block_size = scheduler_cache.hash_block_size = hashed
    kernel_blocks = utils.prepare_kernel_block_sizes(cache, _attention_groups(cache, backends))
    return Registered(
        config,
        scheduler_config,
        cache,
        scheduler_cache,
        utils.allocate_kv_cache(cache, torch.device("cpu"), layout, kernel_blocks),
        tuple(sorted({backend.get_name() for backend in backends.values()})),
        tuple(kernel_blocks),
    )


def _of_scheduler(config: Any, cache: Any) -> Any:
    """The engine core sets the block size by the groups, after the workers were configured."""
    found = copy.copy(config)
    found.cache_config = copy.copy(config.cache_config)
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    sizes = [spec.block_size for spec in specs if spec.prefix_cacheable]
    found.cache_config.block_size = min(sizes or [spec.block_size for spec in specs])
    return found


def _attention_groups(cache: Any, backends: Mapping[str, Any]) -> list[list[Any]]:
    """As the model runner divides each group: layers of one backend and spec together."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    found = []
    for group in cache.kv_cache_groups:
        alike: dict[Any, list[str]] = {}
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            alike.setdefault((backends[name], spec), []).append(name)
        found.append(
            [
                SimpleNamespace(backend=backend, kv_cache_spec=spec, layer_names=names)
                for (backend, spec), names in alike.items()
            ]
        )
    return found
