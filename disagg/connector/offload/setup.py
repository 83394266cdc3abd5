"""Makes an engine's tiers from vLLM's configuration; refuses unsupported engines at start."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.distributed.utils import get_pp_indices
from vllm.utils.hashing import get_hash_fn_by_name

from disagg.checksums import Checksum
from disagg.connector import kv_cache_layout
from disagg.connector.offload import groups, slot_layout
from disagg.connector.offload.groups import Chunks
from disagg.connector.offload.settings import ObjectSettings, OffloadSettings
from disagg.connector.offload.slot_layout import SlotLayout
from disagg.connector.recurrent_state import state_groups
from disagg.connector.whole_pages import block_size, group_block_sizes, packed_on
from disagg.errors import ConfigError
from disagg.identity.model import model_fields
from disagg.store.base import Key, SharedTier
from disagg.store.directory import Directory, DirectoryFinder
from disagg.store.directory_files import TensorSpec
from disagg.store.directory_space import DirectorySpace
from disagg.store.fingerprint import Fingerprint
from disagg.store.host_index import HostIndex
from disagg.store.objects.guard import GuardedStore
from disagg.store.objects.open import ObjectOptions, open_store, space_of
from disagg.store.objects.tier import ObjectFinder, Objects
from disagg.store.shared_index import Finder, FindingsLimits, SharedIndex
from disagg.transport.blocks import BlockCache, Region
from disagg.transport.control.secret import read_secret
from disagg.vllm_compat import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


_MOST_BLOCKS = 4
"""Of a group's blocks, in the place of one of another group's. A slot is as large as the most."""


def chunk_settings(settings: OffloadSettings, kv_cache: KVCacheConfig) -> OffloadSettings:
    """With chunks of whole blocks in each group, where these differ in size: the engine's smallest
    blocks of a chunk are then more than was set."""
    sizes = group_block_sizes(kv_cache)
    least = math.lcm(*sizes) // min(sizes)
    return settings.model_copy(update={"blocks_per_chunk": settings.blocks_per_chunk * least})


def check_supported(config: VllmConfig, kv_cache: KVCacheConfig, stage: int = 0) -> None:
    """Raise `ConfigError` for engines whose blocks the tiers cannot keep. stage: the cache's."""
    kv_cache_layout.check_supported(config, kv_cache)
    sizes = sorted(set(group_block_sizes(kv_cache)))
    if math.lcm(*sizes) > _MOST_BLOCKS * sizes[0]:
        raise ConfigError(
            f"model: {config.model_config.model} has blocks of {'/'.join(map(str, sizes))} tokens; "
            f"a slot of the tiers would be {math.lcm(*sizes) // sizes[0]} blocks, most of them "
            "empty; remove the tiers"
        )
    layers = stages(config)
    if layers and not slot_layout.are_alike(kv_cache, layers[stage]):
        raise ConfigError(
            f"pipeline_parallel_size: {len(layers)} — tiers keep stages only of layers that are "
            "all alike; set 1, or remove the tiers"
        )
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching: false — tiers find blocks by vLLM's prefix hashes; switch it "
            "on, or remove the tiers (vLLM switches it off for MLA on CPUs without AMX)"
        )


def ranks(config: VllmConfig) -> int:
    """How many worker ranks hold a part of each chunk."""
    parallel = config.parallel_config
    return int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


def stages(config: VllmConfig) -> list[int]:
    """How many layers each pipeline stage has; empty for one stage. All processes of an engine must
    compute the same slots and fingerprint, although each one knows only its own layers."""
    size = config.parallel_config.pipeline_parallel_size
    if size == 1:
        return []
    total = config.model_config.get_total_num_hidden_layers()
    cuts = [get_pp_indices(total, stage, size) for stage in range(size)]
    return [end - begin for begin, end in cuts]


def chunks(settings: OffloadSettings, config: VllmConfig, kv_cache: KVCacheConfig) -> Chunks:
    """How prompts are divided in each group. Raises `ConfigError` if states end within chunks."""
    if settings.blocks_per_chunk > 1 and state_groups(kv_cache):
        raise ConfigError(
            f"kv_connector_extra_config.blocks_per_chunk: {settings.blocks_per_chunk} — a state "
            "may follow any block of a chunk; set 1"
        )
    per, tokens = settings.blocks_per_chunk, block_size(kv_cache)
    hash_bytes = len(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)(b""))
    sizes = group_block_sizes(kv_cache)
    return Chunks(groups.read(kv_cache), per, tokens, hash_bytes, sizes)


def layout(settings: OffloadSettings, config: VllmConfig, kv_cache: KVCacheConfig) -> SlotLayout:
    """The layout of the slots. Raises `ConfigError` for a pool without a slot."""
    slot = slot_layout.block_bytes(kv_cache, stages(config)) * settings.blocks_per_chunk
    shared = settings.directory or settings.objects
    namespace = fingerprint(settings, config, kv_cache).namespace if shared else ""
    return SlotLayout(slot_layout.slots_of(settings, slot), slot, namespace)


def writes_blocks_first(config: VllmConfig, kv_cache: KVCacheConfig) -> bool:
    """Whether vLLM's model runner may write to a step's new blocks before it calls the connector.

    The second runner zeroes and copies them before `handle_preemptions`.
    """
    return bool(config.use_v2_model_runner and kv_cache.needs_kv_cache_zeroing)


def host_index(settings: OffloadSettings, config: VllmConfig, slots: int) -> HostIndex:
    """The scheduler's half of the host memory tier."""
    return HostIndex(slots, settings.eviction, events=_events(config))


def shared_index(
    settings: OffloadSettings, config: VllmConfig, kv_cache: KVCacheConfig
) -> SharedIndex | None:
    """The scheduler's half of the tier that engines share, if there is one."""
    finder: Finder
    if settings.directory is not None:
        identity = fingerprint(settings, config, kv_cache)
        finder = DirectoryFinder(settings.directory, identity, ranks(config))
    elif settings.objects is not None:
        identity = fingerprint(settings, config, kv_cache)
        finder = ObjectFinder(_object_store(settings.objects), identity, ranks(config))
    else:
        return None
    limits = FindingsLimits(patience_s=settings.lookup_deadline_s)
    return SharedIndex(finder, limits, events=_events(config))


def shared_tier(
    settings: OffloadSettings,
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    cache: BlockCache,
    rank: int,
    on_evicted: Callable[[list[Key]], None],
) -> SharedTier | None:
    """A worker's half of the tier that engines share, if there is one. on_evicted: called in
    another thread."""
    if settings.directory is None and settings.objects is None:
        return None
    identity = fingerprint(settings, config, kv_cache)

    def on_removed(namespace: str, keys: list[Key]) -> None:
        if namespace == identity.namespace:
            on_evicted(keys)

    chunk = cache.whole(range(settings.blocks_per_chunk))
    tensors = [
        TensorSpec(_tensor_name(region), region.dtype, tuple(cache.shape(index, chunk)))
        for index, region in enumerate(cache.regions)
    ]
    checksum = _checksum(settings)
    if settings.objects is not None:
        store = _object_store(settings.objects)
        swept = space_of(_object_options(settings.objects), store, on_removed) if not rank else None
        ttl_s = settings.objects.ttl_s
        return Objects(store, identity, rank, tensors, swept, checksum=checksum, ttl_s=ttl_s)
    assert settings.directory is not None
    space = DirectorySpace(settings.directory, settings.directory_bytes, on_removed)
    return Directory(settings.directory, identity, rank, tensors, space, checksum=checksum)


def _object_options(settings: ObjectSettings) -> ObjectOptions:
    return ObjectOptions(**settings.model_dump(exclude={"checksum", "reset_keeps_objects"}))


def _object_store(settings: ObjectSettings) -> GuardedStore:
    return open_store(_object_options(settings))


def _tensor_name(region: Region) -> str:
    """Files whose tensors have other names are not read."""
    return f"{region.name} {region.form}".rstrip()


def fingerprint(
    settings: OffloadSettings, config: VllmConfig, kv_cache: KVCacheConfig
) -> Fingerprint:
    """What determines a chunk's bytes. Raises `ConfigError` if no two engines could share it."""
    model, caching = config.model_config, config.cache_config
    fields = {
        "model": Path(model.model).name,
        **model_fields(config),
        "vllm_version": versions.blocks_of(),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_dtype": slot_layout.kv_dtype(kv_cache, str(caching.cache_dtype)),
        "layout": str(kv_cache.kv_cache_layout),
        **slot_layout.fields(kv_cache, stages(config)),
        **({"packed_on": gpu} if (gpu := packed_on(kv_cache)) else {}),
        "block_size": str(block_size(kv_cache)),
        "blocks_per_chunk": str(settings.blocks_per_chunk),
        "tp_size": str(config.parallel_config.tensor_parallel_size),
        "device": str(config.device_config.device_type),
        "checksum": _checksum(settings).kind,
    }
    algorithm = str(caching.prefix_caching_hash_algo)
    seed = kv_cache_layout.hash_seed(config, "of the shared tier")
    return Fingerprint(fields, {"hash_algorithm": algorithm, "hash_seed": seed})


def _checksum(settings: OffloadSettings) -> Checksum:
    """Of the shared tier's chunks. Engines with different secrets use different namespaces."""
    if settings.checksum == "fast":
        return Checksum()
    return Checksum.named("keyed", b"disagg tier files", read_secret())


def _events(config: VllmConfig) -> bool:
    events = config.kv_events_config
    return bool(events and events.enable_kv_cache_events)
