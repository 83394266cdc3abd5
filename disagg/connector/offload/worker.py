"""The worker half of one rank: copies between blocks and slots, and between slots and files.

vLLM calls in from its model loop; nothing here blocks it but the copies of blocks that are about
to be overwritten. Whatever is read from a file lands in a slot first and is copied into blocks by
whoever waits for it: a read that comes too late can never touch a block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from disagg.connector import geometry
from disagg.connector.offload.messages import (
    Done,
    Load,
    OffloadReport,
    OffloadWork,
    Read,
    Store,
    Write,
)
from disagg.connector.offload.settings import OffloadSettings
from disagg.store.base import Key, Slot
from disagg.store.directory import Directory
from disagg.store.host_pool import HostPool
from disagg.transport.blocks import BlockCache, Bytes, copy_all, parts
from disagg.transport.host_memory import collapse

logger = logging.getLogger(__name__)

TO_HOST, FROM_HOST = "GPU_to_CPU", "CPU_to_GPU"
TO_FILE, FROM_FILE = "CPU_to_STORAGE", "STORAGE_to_CPU"
_READERS = 4
# What one call copies, while the next is made ready; of less, one thread is done sooner than two.
_COPY_BYTES = 16 << 20
# What is stored now is wanted later: it must not take a core from what is computed now.
_NICE = 10
OnEvicted: TypeAlias = Callable[[list[Key]], None]


class OffloadWorker:
    """Worker side of `DisaggOffloadConnector`, for one tensor-parallel rank."""

    def __init__(
        self,
        settings: OffloadSettings,
        slots: int,
        open_files: Callable[[BlockCache, OnEvicted], Directory | None],
    ) -> None:
        self._settings, self._slots, self._open_files = settings, slots, open_files
        self._files: Directory | None = None
        self._cache: BlockCache | None = None
        self._pool: HostPool | None = None
        self._deferred: list[Store] = []
        self._storing: dict[int, Future[None]] = {}
        self._ended: queue.SimpleQueue[Done | Read] = queue.SimpleQueue()
        self._evicted: queue.SimpleQueue[list[Key]] = queue.SimpleQueue()
        self._report = OffloadReport()
        self._store_pool = ThreadPoolExecutor(1, "kv-store", initializer=_be_nice)
        self._write_pool = ThreadPoolExecutor(2, "kv-write", initializer=_be_nice)
        self._load_pool = ThreadPoolExecutor(2, "kv-load")
        self._copy_pool = ThreadPoolExecutor(2, "kv-copy")
        self._read_pool = ThreadPoolExecutor(_READERS, "kv-read")
        self._loads: dict[int, str] = {}
        self._closed = threading.Event()

    # ---- start and end ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches, and the memory for the pool."""
        self._cache = cache = geometry.block_cache(kv_caches)
        slot_bytes = cache.block_bytes * self._settings.blocks_per_chunk
        slots = self._slots
        collapse(cache.host_memory())
        self._pool = HostPool(slots, slot_bytes, None if cache.on_host else _pin)
        self._files = self._open_files(cache, self._evicted.put)
        logger.info(
            "%s: tiers of %d slots of %d bytes%s",
            self._settings.engine_name or "this engine",
            slots,
            slot_bytes,
            f", files in {self._settings.directory}" if self._files else "",
        )

    def shutdown(self) -> None:
        """What was not stored by now is forgotten."""
        self._closed.set()
        pools = (self._store_pool, self._write_pool, self._load_pool, self._read_pool)
        for pool in (*pools, self._copy_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- each step -------------------------------------------------------------------------

    def before_step(self, work: OffloadWork) -> None:
        """Begin the stores of the step before, which has sampled by now; wait for those whose
        blocks this step overwrites."""
        for store in self._deferred:
            self._submit(store)
        self._deferred = [store for store in work.stores if store.job not in work.flush]
        for store in work.stores:
            if store.job in work.flush:
                self._submit(store)
        for job in work.flush:
            if (running := self._storing.get(job)) is not None:
                running.result()

    def start(self, work: OffloadWork) -> None:
        """Begin loads and writes."""
        for load in work.loads:
            self._loads[load.job] = load.request_id
            self._load_pool.submit(self._load, load)
        for write in work.writes:
            self._write_pool.submit(self._write, write)
        if work.touched and self._files is not None:
            self._write_pool.submit(self._files.touch, work.touched)

    def finished(self) -> tuple[set[str], set[str]]:
        """Request ids whose load ended since the last call, and those of them that failed."""
        received, failed = set(), set()
        while not self._ended.empty():
            ended = self._ended.get_nowait()
            if isinstance(ended, Read):
                self._report.reads.append(ended)
                continue
            self._report.done.append(ended)
            self._storing.pop(ended.job, None)
            if (request_id := self._loads.pop(ended.job, None)) is not None:
                received.add(request_id)
                if ended.failed:
                    failed.add(request_id)
        return received, failed

    def take_report(self) -> OffloadReport | None:
        """What the scheduler half is to hear of, if anything."""
        while not self._evicted.empty():
            self._report.evicted += self._evicted.get_nowait()
        if not (self._report.done or self._report.reads or self._report.evicted):
            return None
        report, self._report = self._report, OffloadReport()
        return report

    def _submit(self, store: Store) -> None:
        ready = _event_of(self.cache)
        self._storing[store.job] = self._store_pool.submit(self._store, store, ready)

    @property
    def cache(self) -> BlockCache:
        """The engine's blocks; not before `register_kv_caches`."""
        assert self._cache is not None
        return self._cache

    def _view(self, slot: Slot) -> memoryview:
        assert self._pool is not None
        return self._pool.slot(slot.number)

    def _bytes(self, slot: Slot) -> Bytes:
        return np.frombuffer(self._view(slot), np.uint8)

    # ---- in threads of ours ----------------------------------------------------------------

    def _store(self, store: Store, ready: Callable[[], None]) -> None:
        """Always reports exactly once: the scheduler half keeps the slots until then."""
        began, failed, reason, num_bytes = time.monotonic(), set[Key](), "", 0
        per = self._settings.blocks_per_chunk
        try:
            ready()
            pairs: list[tuple[Bytes, Bytes]] = []
            for number, slot in enumerate(store.slots):
                ids = store.block_ids[number * per : (number + 1) * per]
                num_bytes += self._out_of_blocks(ids, self._bytes(slot), pairs)
            copy_all(pairs)
        except Exception as error:
            logger.exception("storing blocks failed")
            failed, reason = {slot.key for slot in store.slots}, type(error).__name__
        seconds = time.monotonic() - began
        done = Done(store.job, TO_HOST, num_bytes, seconds, frozenset(failed), reason)
        self._ended.put(done)

    def _load(self, load: Load) -> None:
        """Always reports exactly once: vLLM holds the request's blocks until then."""
        began, reason = time.monotonic(), ""
        deadline = began + self._settings.load_deadline_s
        failed: Key | None = None
        reads = {
            slot.key: self._read_pool.submit(self._read, load.job, slot)
            for slot in load.slots
            if slot.key in load.from_files
        }
        at, per = -load.skip, self._settings.blocks_per_chunk
        copies = _Copies(self._copy_pool)
        try:
            for slot in load.slots:
                failed = slot.key
                if slot.key in reads:
                    copies.begin()
                    left = max(0.0, deadline - time.monotonic())
                    reason = reads[slot.key].result(timeout=left)
                    if reason:
                        break
                ids = load.block_ids[max(at, 0) : at + per]
                skip = per - len(ids)
                copies.added(self._into_blocks(self._bytes(slot), skip, ids, copies.pairs))
                at += per
        except TooLate:
            reason = "deadline"
        except Exception as error:
            logger.exception("loading blocks failed")
            reason = type(error).__name__
        reason = copies.end() or reason
        if not reason and at < len(load.block_ids):
            reason = "gone"
        gone = frozenset([failed or b""]) if reason else frozenset[Key]()
        seconds = time.monotonic() - began
        self._ended.put(Done(load.job, FROM_HOST, copies.num_bytes, seconds, gone, reason))

    def _read(self, job: int, slot: Slot) -> str:
        """Fill a slot from its file; returns why that failed. Reports exactly once."""
        began, num_bytes, reason = time.monotonic(), 0, "closed"
        try:
            if self._files is not None and not self._closed.is_set():
                result = self._files.read(slot.key, [self._view(slot)])
                num_bytes, reason = result.num_bytes, result.reason
        except Exception as error:
            logger.exception("reading a block's file failed")
            reason = type(error).__name__
        self._ended.put(Read(job, slot, num_bytes, time.monotonic() - began, reason))
        return reason

    def _write(self, write: Write) -> None:
        """Reports exactly once."""
        began, num_bytes, reason = time.monotonic(), 0, ""
        failed = set[Key]()
        for slot in write.slots:
            try:
                assert self._files is not None
                result = self._files.write(slot.key, [self._view(slot)])
                num_bytes += result.num_bytes
                problem = result.reason
            except Exception as error:
                logger.exception("writing a block's file failed")
                problem = type(error).__name__
            if problem:
                failed.add(slot.key)
                reason = problem
        seconds = time.monotonic() - began
        self._ended.put(Done(write.job, TO_FILE, num_bytes, seconds, frozenset(failed), reason))

    # ---- bytes -----------------------------------------------------------------------------

    def _out_of_blocks(
        self, block_ids: Sequence[int], slot: Bytes, pairs: list[tuple[Bytes, Bytes]]
    ) -> int:
        """All regions of these blocks, region after region: copied from a device; of host memory
        what is to be copied goes to `pairs`. Returns the bytes."""
        cache, at = self.cache, 0
        selection = cache.whole(block_ids)
        if cache.on_host:
            for index, runs in enumerate(cache.all_runs(selection)):
                views = cache.cut(index, runs)
                size = int(runs.lengths.sum())
                pairs += zip(parts(slot[at : at + size], views), views, strict=True)
                at += size
            return at
        for index in range(len(cache.regions)):
            for piece in cache.gather(index, selection):
                slot[at : at + len(piece)] = piece
                at += len(piece)
        return at

    def _into_blocks(
        self,
        slot: Bytes,
        skip: int,
        block_ids: Sequence[int],
        pairs: list[tuple[Bytes, Bytes]],
    ) -> int:
        """The reverse, without the first `skip` blocks of the slot."""
        cache, at, moved = self.cache, 0, 0
        selection = cache.whole(block_ids)
        runs = cache.all_runs(selection) if cache.on_host else []
        for index, region in enumerate(cache.regions):
            block = region.memory[0].numel()
            size, begin = len(block_ids) * block, at + skip * block
            data = slot[begin : begin + size]
            if cache.on_host:
                views = cache.cut(index, runs[index])
                pairs += zip(views, parts(data, views), strict=True)
            else:
                cache.scatter(index, selection, data)
            at, moved = begin + size, moved + size
        return moved


class _Copies:
    """Copies of one load, by threads that run while the next ones are made ready."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pairs: list[tuple[Bytes, Bytes]] = []
        self.num_bytes = 0
        self._pool, self._begun = pool, list[Future[None]]()
        self._waiting = 0

    def added(self, num_bytes: int) -> None:
        """So much came to `pairs`."""
        self.num_bytes += num_bytes
        self._waiting += num_bytes
        if self._waiting >= _COPY_BYTES:
            self.begin()

    def begin(self) -> None:
        """Copy the pairs there are; new ones go to a new list."""
        if self.pairs:
            self._begun.append(self._pool.submit(copy_all, self.pairs))
            self.pairs, self._waiting = [], 0

    def end(self) -> str:
        """Copy what is left, and wait for all: nothing is written to afterwards. Returns why one
        failed."""
        reason = ""
        last = partial(copy_all, self.pairs)
        ends: list[Callable[[], None]] = [last, *(copy.result for copy in self._begun)]
        for copied in ends:
            try:
                copied()
            except Exception as error:
                logger.exception("copying blocks failed")
                reason = type(error).__name__
        return reason


def _event_of(cache: BlockCache) -> Callable[[], None]:
    """What waits until all that was launched on the model's stream by now has been done."""
    if cache.on_host:
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return lambda: event.synchronize()


def _pin(address: int, size: int) -> Callable[[], None]:
    """Register host memory with the device. Raises `RuntimeError` if it refuses."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(address, size, 0)
    if int(status):
        raise RuntimeError(f"cannot pin {size} bytes of host memory: {status}")
    return lambda: runtime.cudaHostUnregister(address)


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
