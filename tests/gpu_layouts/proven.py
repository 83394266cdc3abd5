"""What our connectors do with a registered cache: move it right, byte by byte, or refuse it.

The connectors are the real ones, both halves of each. Blocks go through real leases and sockets,
and through the tiers' real slots. Only the GPU is host memory, and the kernel that copies blocks is
compiled for the host.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from gpu_layouts.registered import Registered
from transport.host_device import HostDevice, OnDevice, run_kernel

from disagg.errors import ConfigError

RIGHT = "right"
SOURCE, TARGET = [1, 3, 5], [2, 4, 7]
_REST = [0, 1, 3, 5, 6]
_WAIT_S = 30.0
Tensors = Mapping[str, torch.Tensor]


def verdict(prove: Callable[[Registered], None], cache: Registered) -> str:
    """RIGHT, or in which words the cache is refused. Raises `AssertionError` for wrong bytes."""
    try:
        with _on_host_device():
            prove(cache)
    except ConfigError as error:
        words = str(error).replace(str(cache.config.model_config.model), "(its path)")
        return f"refused: {words.splitlines()[0]}"
    return RIGHT


@contextmanager
def _on_host_device() -> Iterator[None]:
    """Both connectors take caches for those of a device in host memory."""
    from disagg.connector import kv_cache_layout
    from disagg.connector.offload import worker
    from disagg.transport.device import staging

    block_cache = kv_cache_layout.block_cache

    def on_device(*args: Any) -> OnDevice:
        return OnDevice(list(block_cache(*args).regions))

    with (
        mock.patch.object(kv_cache_layout, "block_cache", on_device),
        mock.patch.object(staging, "open_device", side_effect=_open),
        mock.patch.object(worker, "_pin", side_effect=_pin),
    ):
        yield


def _open(cache: object) -> HostDevice:
    return HostDevice()


def _pin(address: int, size: int) -> Callable[[], None]:
    return lambda: None


# ---- bytes -----------------------------------------------------------------------------------


def _twin(caches: Tensors) -> dict[str, torch.Tensor]:
    """The same tensors in memory of their own, filled with zeros."""
    storages: dict[int, torch.UntypedStorage] = {}
    twins = {}
    for name, tensor in caches.items():
        own = tensor.untyped_storage()
        storage = storages.setdefault(
            own.data_ptr(), torch.zeros(own.nbytes(), dtype=torch.uint8).untyped_storage()
        )
        twins[name] = torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    return twins


def _all_bytes(caches: Tensors) -> Iterator[torch.Tensor]:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in caches.values()}
    for storage in storages.values():
        yield torch.empty(0, dtype=torch.uint8).set_(storage)


def _randomize(caches: Tensors) -> None:
    for memory in _all_bytes(caches):
        memory.random_(0, 256)


def _blocks(cache: Registered, caches: Tensors, ids: list[int]) -> dict[str, torch.Tensor]:
    """The bytes of these blocks of vLLM's, by layer, as vLLM's own views find them."""
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    return {
        name: torch.stack(
            [_block(group_kernel_blocks(tensor, cache.cache.num_blocks), id_) for id_ in ids]
        )
        for name, tensor in caches.items()
    }


def _block(blocks: torch.Tensor, number: int) -> torch.Tensor:
    return blocks[number].contiguous().view(torch.uint8).reshape(-1)


def _check_moved(cache: Registered, source: Tensors, target: Tensors) -> None:
    """SOURCE of one cache is in TARGET of the other, and nothing else was touched."""
    expected, found = _blocks(cache, source, SOURCE), _blocks(cache, target, TARGET)
    wrong = [name for name, bytes_ in expected.items() if not bytes_.equal(found[name])]
    assert not wrong, f"wrong bytes in {len(wrong)} layers: {wrong[0]}"
    touched = [name for name, bytes_ in _blocks(cache, target, _REST).items() if bytes_.any()]
    assert not touched, f"blocks of {len(touched)} layers were written by mistake: {touched[0]}"


# ---- handoff ---------------------------------------------------------------------------------


def handoff(cache: Registered) -> None:
    """From one engine to another one: through the wire, and by one launch as CUDA IPC does."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    from disagg.connector import DisaggConnector
    from disagg.connector.handoff.engine_facts import EngineFacts
    from disagg.connector.handoff.messages import Grant, HandoffLoad, StepWork

    with ExitStack() as ended:

        def started(role: KVConnectorRole) -> DisaggConnector:
            worker = role is KVConnectorRole.WORKER
            configs = (cache.config, cache.cache) if worker else _of_scheduler(cache)
            connector = DisaggConnector(configs[0], role, configs[1])
            ended.callback(connector.shutdown)
            return connector

        started(KVConnectorRole.SCHEDULER)
        producer, consumer = (started(KVConnectorRole.WORKER) for _ in range(2))
        target = _twin(cache.caches)
        _randomize(cache.caches)
        producer.register_kv_caches(cache.caches)
        consumer.register_kv_caches(target)
        address = producer.worker.address()
        assert address.endpoint is not None
        layers = [address.regions], [consumer.worker.address().regions]
        producer.worker.before_step(StepWork(grants=[Grant(1, "r", SOURCE, 60.0)]))
        unit, whole = EngineFacts.of(*_of_scheduler(cache)).block_size, ((0, len(SOURCE)),)
        load = HandoffLoad("r", 1, [address.endpoint], layers, unit, whole, 0, TARGET)
        consumer.worker.start(StepWork(loads=[load]))
        until = time.monotonic() + _WAIT_S
        while not (ended_ones := consumer.worker.finished())[1]:
            assert time.monotonic() < until, "the load did not end"
            time.sleep(0.001)
        assert not ended_ones[2], _reason(consumer)
        _check_moved(cache, cache.caches, target)
        _by_one_launch(cache)


def _reason(connector: Any) -> str:
    report = connector.worker.take_report()
    return f"the load failed: {report.loads[0].reason}"


def _of_scheduler(cache: Registered) -> tuple[Any, Any]:
    return cache.scheduler_config, cache.scheduler_cache


def _by_one_launch(cache: Registered) -> None:
    from disagg.connector import kv_cache_layout
    from disagg.transport.device import copy_plan

    target = _twin(cache.caches)
    ours, theirs = (
        kv_cache_layout.registered_blocks(cache.config, cache.cache, caches)
        for caches in (target, cache.caches)
    )
    addresses = [region.memory.data_ptr() for region in theirs.regions]
    move = copy_plan.across(ours, ours.whole(TARGET), theirs, theirs.whole(SOURCE), addresses)
    for chunk in move.chunks(64 << 20):
        run_kernel(move, chunk, 0, 0)
    _check_moved(cache, cache.caches, target)


def identity(cache: Registered) -> str:
    """A digest of what two workers compare before they exchange a block."""
    from disagg.connector import cache_fingerprint, kv_cache_layout

    blocks = kv_cache_layout.registered_blocks(cache.config, cache.cache, cache.caches)
    fields = cache_fingerprint.fingerprint(cache.config, cache.cache)
    del fields["checkpoint"]  # of a temporary folder
    layers = cache_fingerprint.layers(cache.cache, cache.caches, blocks)
    return hashlib.sha256(repr((sorted(fields.items()), layers)).encode()).hexdigest()[:12]


# ---- tiers -----------------------------------------------------------------------------------


def tiers(cache: Registered) -> None:
    """Into slots of host memory and back into other blocks; both halves count alike."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    from disagg.connector.offload import DisaggOffloadConnector
    from disagg.connector.offload.messages import Filling, OffloadWork, Store, TierLoad
    from disagg.store.base import Slot

    transfer = KVTransferConfig(
        kv_connector="DisaggOffloadConnector",
        kv_connector_module_path="disagg.connector.offload",
        kv_role="kv_both",
        engine_id="tiers",
        kv_connector_extra_config={"host_bytes": 256 << 20},
    )

    with ExitStack() as ended:

        def started(role: KVConnectorRole) -> DisaggOffloadConnector:
            worker = role is KVConnectorRole.WORKER
            config, of_role = (cache.config, cache.cache) if worker else _of_scheduler(cache)
            config = copy.copy(config)
            config.kv_transfer_config = transfer
            connector = DisaggOffloadConnector(config, role, of_role)
            ended.callback(connector.shutdown)
            return connector

        scheduler = started(KVConnectorRole.SCHEDULER)
        worker = started(KVConnectorRole.WORKER)
        layout = scheduler.scheduler._work.layout
        assert layout == worker.worker._layout, "the two halves count differently"
        _randomize(cache.caches)
        before = _twin(cache.caches)
        for ours, copied in zip(_all_bytes(cache.caches), _all_bytes(before), strict=True):
            copied.copy_(ours)
        worker.register_kv_caches(cache.caches)
        slots = [Slot(bytes([number]) * 32, number) for number in range(len(SOURCE))]
        # A slot holds several blocks where groups differ in their size; null blocks are left out.
        empty = worker.worker._settings.blocks_per_chunk - 1
        ids = [id_ for source in SOURCE for id_ in (*[0] * empty, source)]
        store = Store(0, slots, ids, complete=True)
        worker.worker.before_step(OffloadWork(stores=[store], layout=layout))
        _tier_job_ended(worker)
        for ours in _all_bytes(cache.caches):
            ours.zero_()
        fillings = [Filling([slot], empty, [id_]) for slot, id_ in zip(slots, TARGET, strict=True)]
        worker.worker.start(OffloadWork(loads=[TierLoad(1, "r", fillings)]))
        _tier_job_ended(worker)
        _check_moved(cache, before, cache.caches)


def _tier_job_ended(connector: Any) -> None:
    until = time.monotonic() + _WAIT_S
    while True:
        connector.worker.finished()
        report = connector.worker.take_report()
        if report is not None and report.done:
            assert not report.done[0].reason, report.done[0].reason
            return
        assert time.monotonic() < until, "the tiers' job did not end"
        time.sleep(0.001)
