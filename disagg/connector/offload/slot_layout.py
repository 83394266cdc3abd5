"""The layout of the tiers' slots, which the scheduler half and every worker half compute alike.

vLLM gives a worker the spec of each of its layers, and the scheduler only the first layer's spec of
each group. So this module reads only what both configurations have: a group's layer names, its
first layer's spec, and where vLLM places the layers in memory (`kv_cache_tensors`). With pipeline
stages, all layers of all stages have one spec (`setup.check_supported`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec

from disagg.connector import cache_fingerprint, whole_pages
from disagg.connector.offload import groups
from disagg.connector.offload.settings import OffloadSettings
from disagg.connector.whole_pages import first_spec, layer_specs
from disagg.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )


@dataclass(frozen=True)
class SlotLayout:
    """slots: in the pool of a rank, each of one chunk. slot_bytes: reserved for a slot. namespace:
    of the directory's files, empty without a directory."""

    slots: int
    slot_bytes: int
    namespace: str = ""

    def __str__(self) -> str:
        files = f", files in {self.namespace}" if self.namespace else ""
        return f"{self.slots} slots of {self.slot_bytes} bytes{files}"


def slots_of(settings: OffloadSettings, slot_bytes: int) -> int:
    """How many chunks the pool of a rank holds. Raises `ConfigError` for a pool of none."""
    if settings.host_bytes < slot_bytes:
        raise ConfigError(
            f"kv_connector_extra_config.host_bytes: {settings.host_bytes} — a chunk of "
            f"{settings.blocks_per_chunk} blocks takes {slot_bytes} bytes; "
            "set some hundred times as much"
        )
    return settings.host_bytes // slot_bytes


def block_bytes(kv_cache: KVCacheConfig, stages: Sequence[int] = ()) -> int:
    """Bytes that vLLM reserves for one block over all layers of one rank; with several stages, of
    the largest one.

    All groups share one allocation, in which each block belongs to one group at a time.
    """
    if stages:
        return max(stages) * int(first_spec(kv_cache.kv_cache_groups[0]).page_size_bytes)
    return max(int(tensor.size) for tensor in kv_cache.kv_cache_tensors) // kv_cache.num_blocks


def kv_dtype(kv_cache: KVCacheConfig, cache_dtype: str) -> str:
    """How the first group's bytes are to be read, for the fingerprint of files.

    cache_dtype: this process's setting. vLLM's attention layers may replace it in a worker while
    the model is loaded (`auto` by `fp8`, `fp8` by `fp8_ds_mla`), and then only the specs tell both
    halves the same.
    """
    group = kv_cache.kv_cache_groups[0]
    spec = first_spec(group)
    mode = getattr(spec, "kv_quant_mode", KVQuantMode.NONE)
    name = getattr(spec, "cache_dtype_str", None) or cache_dtype
    if len(_placed(kv_cache, group)) > 1:
        name = mode.name
    elif name == "auto" and mode is not KVQuantMode.NONE:
        name = "fp8"
    name += cache_fingerprint.fp8_variant(name)
    return f"{name} {getattr(spec, 'dtype', '')}"


def are_alike(kv_cache: KVCacheConfig, layers: int) -> bool:
    """Whether a stage's cache consists of so many layers of one spec."""
    (group, *more) = kv_cache.kv_cache_groups
    same = layer_specs(group) == [group.kv_cache_spec] * layers
    return not more and same and len(_placed(kv_cache, group)) <= 1


def fields(kv_cache: KVCacheConfig, stages: Sequence[int] = ()) -> dict[str, str]:
    """The groups, for the fingerprint of files. Groups of like layers keep the texts that they
    always had, so that existing folders are found again."""
    described = [
        f"{sum(stages) or len(group.layer_names)} {type(first_spec(group)).__name__} "
        f"{_pages(kv_cache, group)}"
        for group in kv_cache.kv_cache_groups
    ]
    if stages:
        return {"group": described[0], "stages": ", ".join(map(str, stages))}
    if len(described) == 1:
        return {"group": described[0]}
    kinds = zip(described, groups.read(kv_cache), strict=True)
    texts = [f"{text} {kind.window} {kind.local}" for text, kind in kinds]
    if whole_pages.are_mixed(kv_cache):
        sizes = whole_pages.group_block_sizes(kv_cache)
        texts = [f"{text} in {size}" for text, size in zip(texts, sizes, strict=True)]
    specs = [first_spec(group) for group in kv_cache.kv_cache_groups]
    states = [cache_fingerprint.state_of(spec) for spec in specs if isinstance(spec, MambaSpec)]
    return {"groups": ", ".join(texts), **({"states": ", ".join(states)} if states else {})}


def _pages(kv_cache: KVCacheConfig, group: KVCacheGroupSpec) -> str:
    """Bytes of a layer's block; of layers that differ, each number of layers and their bytes."""
    placed = _placed(kv_cache, group)
    if len(placed) <= 1:
        return str(first_spec(group).page_size_bytes)
    # The other stride is that of all blocks of a layer, or of all layers of a block.
    pages = (min(tensor.layer_stride, tensor.block_stride) for tensor in placed)
    return "+".join(f"{len(t.layers)}x{page}" for t, page in zip(placed, pages, strict=True))


def _placed(kv_cache: KVCacheConfig, group: KVCacheGroupSpec) -> list[KVCacheTensor]:
    """Where a group's layers lie: vLLM places layers of one spec together."""
    names = set(group.layer_names)
    return [tensor for tensor in kv_cache.kv_cache_tensors if names.intersection(tensor.layers)]
