"""The worker half of one rank: copies between blocks and slots, and between slots and
the tier that engines share, the directory or an object store.

vLLM calls in from its model loop, which waits only for copies of blocks that are about to be
overwritten. A chunk is read into a slot first; the load that waits for it then copies the slot into
blocks. So a read that finishes too late never writes to a block.

No address is used unchecked: a slot outside the pool or a block outside the cache fails its job.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from disagg.connector.kv_cache_layout import NULL_BLOCK
from disagg.connector.offload.messages import (
    SLOW,
    Done,
    OffloadReport,
    OffloadWork,
    Read,
    Store,
    TierLoad,
    Write,
)
from disagg.connector.offload.settings import OffloadSettings
from disagg.errors import ConfigError, TransferError
from disagg.store.base import Key, SharedTier, Slot
from disagg.store.host_pool import HostPool
from disagg.transport.blocks import BlockCache, Bytes, copy_all, copy_alone, parts
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device.offload_copy import OffloadCopier, OffloadCopy
from disagg.transport.device.staging import Staging, open_staging
from disagg.transport.host.huge_pages import collapse

logger = logging.getLogger(__name__)

TO_HOST, FROM_HOST = "GPU_to_CPU", "CPU_to_GPU"
TO_FILE, FROM_FILE = "CPU_to_STORAGE", "STORAGE_to_CPU"
_READERS = 4
_MOST_TOUCHES = 64
# Bytes per copy call; the next is prepared meanwhile. Below this one thread is faster than two.
_COPY_BYTES = 16 << 20
# A device copy takes milliseconds, once the model's earlier work is done.
_STORE_S = 60.0
# Stores are not urgent, and must not take a core from the model.
_NICE = 10
_POLL_S = 0.0002
OVERWRITTEN, OUTSIDE = "overwritten", "outside"
OnEvicted: TypeAlias = Callable[[list[Key]], None]


class _Storing(NamedTuple):
    store: Store
    future: Future[None]


class OffloadWorker:
    """Worker side of `DisaggOffloadConnector`, for one tensor-parallel rank."""

    def __init__(
        self,
        settings: OffloadSettings,
        slots: int,
        open_shared: Callable[[BlockCache, OnEvicted], SharedTier | None],
        *,
        layout: str = "",
        blocks_written_first: bool = False,
    ) -> None:
        """layout: this half's `SlotLayout`. blocks_written_first: vLLM's model runner may write to
        a step's blocks before it calls `before_step`."""
        self._settings, self._slots, self._open_shared = settings, slots, open_shared
        self._layout, self._blocks_written_first = layout, blocks_written_first
        self._shared: SharedTier | None = None
        self._cache: BlockCache | None = None
        self._pool: HostPool | None = None
        self._staging: Staging | None = None
        self._keeper: OffloadCopier | None = None
        self._deferred: list[Store] = []
        self._storing: dict[int, _Storing] = {}
        self._lost: dict[int, set[Key]] = {}
        self._step_end: Event | None = None
        self._ended: queue.SimpleQueue[Done | Read] = queue.SimpleQueue()
        self._evicted: queue.SimpleQueue[list[Key]] = queue.SimpleQueue()
        self._report = OffloadReport()
        self._store_pool = ThreadPoolExecutor(1, "kv-store", initializer=_be_nice_alone)
        self._write_pool = ThreadPoolExecutor(2, "kv-write", initializer=_be_nice)
        self._load_pool = ThreadPoolExecutor(2, "kv-load", initializer=copy_alone)
        self._copy_pool = ThreadPoolExecutor(2, "kv-copy", initializer=copy_alone)
        self._read_pool = ThreadPoolExecutor(_READERS, "kv-read")
        self._touching = threading.BoundedSemaphore(_MOST_TOUCHES)
        self._loads: dict[int, str] = {}
        self._submitted: dict[int, float] = {}
        self._last_slow = 0.0
        self._closed = threading.Event()

    # ---- start and end ---------------------------------------------------------------------

    def register(self, cache: BlockCache) -> None:
        """Take the engine's blocks, and the memory for the pool and on the device."""
        self._cache = cache
        slot_bytes = cache.block_bytes * self._settings.blocks_per_chunk
        slots = self._slots
        if slots * slot_bytes > self._settings.host_bytes:
            raise ConfigError(
                f"kv_connector_extra_config.host_bytes: {self._settings.host_bytes} — {slots} "
                f"slots of {slot_bytes} bytes do not fit: this model's blocks are larger than "
                "vLLM's KV cache configuration says; remove the tiers"
            )
        collapse(cache.host_memory())
        self._pool = HostPool(slots, slot_bytes, None if cache.on_host else _pin)
        self._open_staging(cache)
        self._shared = self._open_shared(cache, self._evicted.put)
        logger.info(
            "%s: tiers of %d slots of %d bytes%s",
            self._settings.engine_name or "this engine",
            slots,
            slot_bytes,
            f", chunks in {self._shared.place}" if self._shared else "",
        )

    def _open_staging(self, cache: BlockCache) -> None:
        per = self._settings.blocks_per_chunk
        self._staging = open_staging(
            cache,
            self._settings.staging_bytes,
            sends=True,
            receives=True,
            blocks=per,
            pinned=False,  # the tiers' own memory is pinned
            setting="kv_connector_extra_config.staging_bytes",
        )
        if self._staging is not None:
            self._keeper = OffloadCopier(self._staging, cache, per)

    def shutdown(self) -> None:
        """Cancel all jobs; what is not stored by now is lost."""
        self._closed.set()
        pools = (self._store_pool, self._write_pool, self._load_pool, self._read_pool)
        for pool in (*pools, self._copy_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._shared is not None:
            self._shared.close()
        if self._staging is not None:
            self._staging.close()

    # ---- each step -------------------------------------------------------------------------

    def before_step(self, work: OffloadWork) -> None:
        """Begin the stores whose blocks earlier steps computed; wait for the stores whose blocks
        this step's forward pass overwrites. Chunks whose blocks may be overwritten already fail."""
        self._check_layout(work)
        begin, self._deferred = list(self._deferred), []
        for store in work.stores:
            now = store.complete or store.job in work.flush
            (begin if now else self._deferred).append(store)
        for store in (*begin, *self._deferred):
            self._lose(store, work.overwritten.get(store.job))
        running = [self._storing[job] for job in work.overwritten if job in self._storing]
        self._begin(begin)
        for job in work.flush:
            if (storing := self._storing.get(job)) is not None:
                storing.future.result()
        for storing in running:
            if not self._ended_in_time(storing.future):
                self._lose(storing.store, work.overwritten[storing.store.job])

    def after_step(self) -> None:
        """vLLM launched all of a step. If it writes to blocks before it calls `before_step` again,
        begin this step's stores now."""
        if self._blocks_written_first:
            self._step_end = self._fence() if self._storing or self._deferred else None
            stores, self._deferred = self._deferred, []
            self._begin(stores)

    def _begin(self, stores: Sequence[Store]) -> None:
        after = self._fence() if stores else None
        for store in stores:
            left = self._without_lost(store)
            if left.slots:
                future = self._store_pool.submit(self._store, left, after)
                self._storing[store.job] = _Storing(store, future)
            else:
                self._ended.put(Done(store.job, TO_HOST, 0, 0.0))

    def _lose(self, store: Store, blocks: set[int] | None) -> None:
        """Let the chunks of these blocks fail when the store ends."""
        if blocks:
            lost = {slot.key for slot, ids in self._blocks_of(store) if not blocks.isdisjoint(ids)}
            self._lost.setdefault(store.job, set()).update(lost)

    def _without_lost(self, store: Store) -> Store:
        lost = self._lost.get(store.job)
        if not lost:
            return store
        left = [(slot, ids) for slot, ids in self._blocks_of(store) if slot.key not in lost]
        ids = [id_ for _, of_slot in left for id_ in of_slot]
        return replace(store, slots=[slot for slot, _ in left], block_ids=ids)

    def _blocks_of(self, store: Store) -> list[tuple[Slot, list[int]]]:
        per, ids = self._settings.blocks_per_chunk, store.block_ids
        return [(slot, ids[n * per : (n + 1) * per]) for n, slot in enumerate(store.slots)]

    def _ended_in_time(self, storing: Future[None]) -> bool:
        """Wait for a store until the model's stream passes the end of the previous step; returns
        whether the store ended before that. This step's first writes to blocks are later in the
        stream. Always false in host memory: without a stream, nothing shows which came first."""
        end, deadline = self._step_end, time.monotonic() + _STORE_S
        if end is None:
            return False
        try:
            while not end.is_done() and time.monotonic() < deadline:
                if storing.done():
                    return not end.is_done()
                with contextlib.suppress(TooLate):
                    storing.result(timeout=_POLL_S)
        except Exception:
            logger.exception("waiting for a store failed")
        return False

    def _check_layout(self, work: OffloadWork) -> None:
        if work.layout and self._layout and work.layout != self._layout:
            raise ConfigError(
                f"kv_connector_extra_config: the tiers' scheduler counts {work.layout}, and this "
                f"worker {self._layout}; remove the tiers"
            )

    def start(self, work: OffloadWork) -> None:
        """Begin loads and writes."""
        # Earlier steps may still write to blocks that vLLM has since given to loads.
        after = self._fence() if work.loads else None
        for load in work.loads:
            self._loads[load.job] = load.request_id
            self._submitted[load.job] = time.monotonic()
            self._load_pool.submit(self._load, load, after)
        for write in work.writes:
            self._write_pool.submit(self._write, write)
        if work.touched:
            self._touch(work.touched)

    def _touch(self, keys: list[Key]) -> None:
        """Only a hint, so a tier that is far behind misses some."""
        shared = self._shared
        if shared is not None and self._touching.acquire(blocking=False):
            touched = self._write_pool.submit(shared.touch, keys)
            touched.add_done_callback(lambda _: self._touching.release())

    def finished(self) -> tuple[set[str], set[str]]:
        """Request ids whose load ended since the last call, and those whose load failed."""
        received, failed = set(), set()
        while not self._ended.empty():
            ended = self._ended.get_nowait()
            if isinstance(ended, Read):
                self._report.reads.append(ended)
                continue
            self._storing.pop(ended.job, None)
            if lost := self._lost.pop(ended.job, None):
                failed_keys = ended.failed | lost
                ended = replace(ended, failed=failed_keys, reason=ended.reason or OVERWRITTEN)
            self._report.done.append(ended)
            if (request_id := self._loads.pop(ended.job, None)) is not None:
                received.add(request_id)
                if ended.failed:
                    failed.add(request_id)
        return received, failed

    def take_report(self) -> OffloadReport | None:
        """What ended since the last report; None if nothing did."""
        while not self._evicted.empty():
            self._report.evicted += self._evicted.get_nowait()
        if not (self._report.done or self._report.reads or self._report.evicted):
            return None
        report, self._report = self._report, OffloadReport()
        return report

    def _fence(self) -> Event | None:
        """On a device: an event after all work launched on the model's stream so far. If the device
        refuses, the jobs that wait for the event fail, and not vLLM's step."""
        try:
            return None if self._staging is None else self._staging.device.model_fence()
        except Exception as error:
            logger.exception("recording an event on the model's stream failed")
            return _NoEvent(error)

    @property
    def cache(self) -> BlockCache:
        """The engine's blocks; not before `register`."""
        assert self._cache is not None
        return self._cache

    def _view(self, slot: Slot) -> memoryview:
        return self._pool_with(slot).slot(slot.number)

    def _address(self, slot: Slot) -> int:
        pool = self._pool_with(slot)
        return pool.address + slot.number * pool.slot_bytes

    def _pool_with(self, slot: Slot) -> HostPool:
        """The pool; raises `TransferError` for a slot outside it."""
        assert self._pool is not None
        if not 0 <= slot.number < self._pool.slots:
            raise TransferError(f"slot {slot.number} of {self._pool.slots}", OUTSIDE)
        return self._pool

    def _check_blocks(self, skip: int, block_ids: Sequence[int]) -> None:
        """Raise `TransferError` for blocks outside the cache, or more than a slot holds."""
        count = self.cache.num_blocks
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < count:
            raise TransferError(f"blocks outside 0..{count - 1}", OUTSIDE)
        if not 0 <= skip <= skip + len(block_ids) <= self._settings.blocks_per_chunk:
            raise TransferError(f"{len(block_ids)} blocks after {skip} in a slot", OUTSIDE)

    def _bytes(self, slot: Slot) -> Bytes:
        return np.frombuffer(self._view(slot), np.uint8)

    # ---- in background threads ----------------------------------------------------------------

    def _store(self, store: Store, after: Event | None) -> None:
        """Always reports exactly once: the scheduler half keeps the slots until then."""
        began, failed, reason, num_bytes = time.monotonic(), set[Key](), "", 0
        try:
            num_bytes = self._out_of_blocks(store, after)
        except Exception as error:
            logger.exception("storing blocks failed")
            failed, reason = {slot.key for slot in store.slots}, _reason(error)
        seconds = time.monotonic() - began
        done = Done(store.job, TO_HOST, num_bytes, seconds, frozenset(failed), reason)
        self._ended.put(done)

    def _load(self, load: TierLoad, after: Event | None) -> None:
        """Always reports exactly once: vLLM holds the request's blocks until then."""
        began, reason = time.monotonic(), ""
        deadline = began + self._settings.load_deadline_s
        read_by = min(deadline, began + load.limit_s)
        failed: Key | None = None
        if self._found_slow(load):
            self._ended.put(Done(load.job, FROM_HOST, 0, 0.0, load.from_shared, SLOW))
            return
        reads = {
            slot.key: (slot, self._read_pool.submit(self._read, load.job, slot))
            for slot in _read_first(load)
        }
        copies = self._copies(Deadline(deadline), after)
        try:
            for slot, skip, ids in self._chunks(load):
                failed = slot.key
                if slot.key in reads:
                    copies.begin()
                    left = max(0.0, read_by - time.monotonic())
                    reason = reads[slot.key][1].result(timeout=left)
                    if reason:
                        break
                copies.added(self._into_blocks(slot, skip, ids, copies.pairs))
        except TooLate:
            reason = "deadline" if time.monotonic() >= deadline else SLOW
            self._leave(load.job, reads.values(), reason)
        except Exception as error:
            logger.exception("loading blocks failed")
            reason = _reason(error)
        reason = copies.end() or reason
        gone = frozenset([failed or b""]) if reason else frozenset[Key]()
        seconds = time.monotonic() - began
        self._ended.put(Done(load.job, FROM_HOST, copies.num_bytes, seconds, gone, reason))

    def _found_slow(self, load: TierLoad) -> bool:
        """Whether another load was late while this one waited for its turn. Then its reads end."""
        submitted = self._submitted.pop(load.job, math.inf)
        if not load.from_shared or self._last_slow < submitted:
            return False
        for slot in _read_first(load):
            self._ended.put(Read(load.job, slot, 0, 0.0, SLOW))
        return True

    def _leave(self, job: int, reads: Iterable[tuple[Slot, Future[str]]], reason: str) -> None:
        """Do not begin these reads any more; those that run fill host memory for later."""
        if reason == SLOW:
            self._last_slow = time.monotonic()
        for slot, read in reads:
            if read.cancel():
                self._ended.put(Read(job, slot, 0, 0.0, reason))

    def _chunks(self, load: TierLoad) -> Iterator[tuple[Slot, int, list[int]]]:
        """Per slot: how many of its first blocks to skip, and the blocks that the others fill."""
        per = self._settings.blocks_per_chunk
        for filling in load.fillings:
            skip, targets = filling.skip, filling.block_ids
            if targets and not 0 <= skip < per:
                raise TransferError("vLLM allocated other blocks than the lookup was for", "gone")
            if len(filling.slots) * per < skip + len(targets):
                raise TransferError("the chunks to load are not in the tiers any more", "gone")
            for number, slot in enumerate(filling.slots):
                ids = targets[max(0, number * per - skip) : (number + 1) * per - skip]
                if ids:
                    yield slot, 0 if number else skip, ids

    def _read(self, job: int, slot: Slot) -> str:
        """Fill a slot from the shared tier; returns why that failed. Reports exactly once."""
        began, num_bytes, reason = time.monotonic(), 0, "closed"
        try:
            if self._shared is not None and not self._closed.is_set():
                result = self._shared.read(slot.key, [self._view(slot)])
                num_bytes, reason = result.num_bytes, result.reason
        except Exception as error:
            logger.exception("reading a chunk failed")
            reason = _reason(error)
        self._ended.put(Read(job, slot, num_bytes, time.monotonic() - began, reason))
        return reason

    def _write(self, write: Write) -> None:
        """Reports exactly once."""
        began, num_bytes, reason = time.monotonic(), 0, ""
        failed = set[Key]()
        for slot in write.slots:
            try:
                assert self._shared is not None
                result = self._shared.write(slot.key, [self._view(slot)])
                num_bytes += result.num_bytes
                problem = result.reason
            except Exception as error:
                logger.exception("writing a chunk failed")
                problem = _reason(error)
            if problem:
                failed.add(slot.key)
                reason = problem
        seconds = time.monotonic() - began
        self._ended.put(Done(write.job, TO_FILE, num_bytes, seconds, frozenset(failed), reason))

    # ---- bytes -----------------------------------------------------------------------------

    def _out_of_blocks(self, store: Store, after: Event | None) -> int:
        """Copy blocks to their slots, all regions, region after region; returns the bytes."""
        per, chunks = self._settings.blocks_per_chunk, list[tuple[Slot, int, list[int]]]()
        for slot, of_slot in self._blocks_of(store):
            if len(of_slot) != per:
                raise TransferError(f"{len(of_slot)} blocks for a slot of {per}", OUTSIDE)
            ids = [id_ for id_ in of_slot if id_ != NULL_BLOCK]
            self._check_blocks(per - len(ids), ids)
            chunks.append((slot, per - len(ids), ids))
        if self._keeper is not None:
            kept = [OffloadCopy(self._address(slot), skip, ids) for slot, skip, ids in chunks]
            self._keeper.store(kept, Deadline.after(_STORE_S), after)
        else:
            copy_all([pair for chunk in chunks for pair in self._pairs(*chunk)])
        return sum(len(ids) for _, _, ids in chunks) * self.cache.block_bytes

    def _into_blocks(
        self, slot: Slot, skip: int, block_ids: Sequence[int], pairs: list[Any]
    ) -> int:
        """Append to `pairs` the copies from a slot, without its first `skip` blocks, to blocks.
        Returns their bytes."""
        self._check_blocks(skip, block_ids)
        if self._keeper is not None:
            pairs.append(OffloadCopy(self._address(slot), skip, block_ids))
        else:
            pairs += [(to, data) for data, to in self._pairs(slot, skip, block_ids)]
        return len(block_ids) * self.cache.block_bytes

    def _pairs(
        self, slot: Slot, skip: int, block_ids: Sequence[int]
    ) -> Iterator[tuple[Bytes, Bytes]]:
        """The same bytes in the slot and in blocks of host memory."""
        cache, rest = self.cache, self._bytes(slot)
        per = self._settings.blocks_per_chunk
        for region, views in zip(cache.regions, cache.views(cache.whole(block_ids)), strict=True):
            block = region.memory[0].numel()
            yield from zip(parts(rest[skip * block :], views), views, strict=True)
            rest = rest[per * block :]

    def _copies(self, deadline: Deadline, after: Event | None) -> _Copies:
        keeper = self._keeper
        if keeper is None:
            return _Copies(self._copy_pool)
        return _Copies(self._copy_pool, lambda kept: keeper.load(kept, deadline, after))


class _NoEvent:
    """In place of an event that could not be recorded."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_done(self) -> bool:
        raise TransferError(f"no event on the model's stream: {self._error}", "device")


class _Copies:
    """Copies of one load, by threads that run while the next ones are made ready. `pairs`: what
    the next call of `copy` is given."""

    def __init__(
        self, pool: ThreadPoolExecutor, copy: Callable[[list[Any]], None] = copy_all
    ) -> None:
        self.pairs: list[Any] = []
        self.num_bytes = 0
        self._copy = copy
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
            self._begun.append(self._pool.submit(self._copy, self.pairs))
            self.pairs, self._waiting = [], 0

    def end(self) -> str:
        """Copy what is left, and wait for all: nothing is written to afterwards. Returns why one
        failed."""
        reason = ""
        last = [partial(self._copy, self.pairs)] if self.pairs else []
        ends: list[Callable[[], None]] = [*last, *(copy.result for copy in self._begun)]
        for copied in ends:
            try:
                copied()
            except Exception as error:
                logger.exception("copying blocks failed")
                reason = _reason(error)
        return reason


def _read_first(load: TierLoad) -> list[Slot]:
    """The slots that a load reads from the shared tier."""
    slots = (slot for filling in load.fillings for slot in filling.slots)
    return [slot for slot in slots if slot.key in load.from_shared]


def _reason(error: Exception) -> str:
    """In one word, for a metric's label."""
    return error.reason if isinstance(error, TransferError) else type(error).__name__


def _pin(address: int, size: int) -> Callable[[], None]:
    """Register host memory with the device. Raises `RuntimeError` if it refuses."""
    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, size, 0)
    if int(status):
        raise RuntimeError(f"cannot pin {size} bytes of host memory: {status}")
    return lambda: runtime.cudaHostUnregister(address)


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _be_nice_alone() -> None:
    _be_nice()
    copy_alone()
