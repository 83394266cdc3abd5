"""Bounded staging memory between blocks on a device and the wire: one chunk fills, one leaves.

All of it is allocated at the start, so transfers never take memory from the engine later. A fetch
borrows one slot: a stream, chunks on the device, and pinned chunks if the wire needs host memory.
Sending and receiving have separate slots, so that two workers that send to each other cannot
deadlock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from disagg.errors import ConfigError, PeerLost, TransferError
from disagg.transport.blocks import BlockCache, Bytes, Selection
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device import copy_plan
from disagg.transport.device.base import (
    Device,
    DeviceMemory,
    DeviceStream,
    Pinned,
    Wait,
    look_at_nothing,
)
from disagg.transport.device.copy_plan import Chunk
from disagg.transport.device.open import open_device

logger = logging.getLogger(__name__)

DEPTH = 2
# Larger chunks gain nothing; with smaller ones the cost of launches and copies shows.
_LARGEST_CHUNK = 8 << 20
SETTING = "transfer.staging_bytes"
_SETTLE_S = 10.0
_LOOK_S = 0.05


@dataclass
class Slot:
    """One fetch's share: DEPTH `chunks` of device memory, and as many `pinned` ones if fetches pass
    through host memory."""

    stream: DeviceStream
    chunks: list[DeviceMemory]
    pinned: list[Pinned] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until the stream has done all its work.

        Raises `PeerLost` if that takes too long, another `TransferError` if the work failed.
        """
        Wait(Deadline.after(_SETTLE_S)).until(self.stream.record().is_done)

    def free(self) -> None:
        """Free everything."""
        chunks, pinned = [one.free for one in self.chunks], [one.free for one in self.pinned]
        for give_back in (self.stream.close, *chunks, *pinned):
            with contextlib.suppress(TransferError):  # a failed device frees nothing
                give_back()


class Slots:
    """The slots of one direction, given out in the order of requests."""

    def __init__(self, device: Device, slots: list[Slot]) -> None:
        self._device, self._free = device, list(slots)
        self.count = len(slots)
        """How many there were at the start."""
        self._lost: list[Slot] = []
        self._closed = False
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(
        self, deadline: Deadline, look: Callable[[], None] = look_at_nothing
    ) -> Iterator[Slot]:
        """A slot, for the context; its work is done when the context ends.

        Makes the device current for this thread. look: may end the wait for a slot by raising.
        Raises `PeerLost` at the deadline, `TransferError` (reason "device") if no slot is left.
        """
        self._device.use()
        slot = self._next(Wait(deadline, look))
        try:
            yield slot
        finally:
            self._give_back(slot)

    def close(self) -> None:
        """Free the idle slots; the others are freed after use."""
        with self._changed:
            self._closed = True
            slots, self._free = self._free, []
            self._changed.notify_all()
        self._device.use()
        for slot in slots:
            slot.free()

    def _next(self, wait: Wait) -> Slot:
        mine = object()
        with self._changed:
            self._waiting.append(mine)
            try:
                while not (self._free and self._waiting[0] is mine):
                    if self._closed or len(self._lost) == self.count:
                        raise TransferError("no memory to stage in is left", reason="device")
                    wait.look()
                    self._changed.wait(min(_LOOK_S, wait.deadline.left()))
                return self._free.pop()
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()

    def _give_back(self, slot: Slot) -> None:
        with contextlib.suppress(TransferError):  # the slot's own work reports that, too
            self._device.use()  # an iterator that was not closed may end in any thread
        usable = self._is_at_rest(slot)
        with self._changed:
            closed = self._closed
            if not usable:
                self._lost.append(slot)
            elif not closed:
                self._free.append(slot)
            self._changed.notify_all()
        if usable and closed:
            slot.free()

    def _is_at_rest(self, slot: Slot) -> bool:
        """Wait until the slot is idle; returns whether another fetch can use it."""
        while True:
            try:
                slot.settle()
            except PeerLost:
                # It may still write to blocks that vLLM frees next, so keep waiting.
                logger.error("a transfer's work on the device has not ended in %.0f s", _SETTLE_S)
            except TransferError as error:
                logger.error("a transfer's work on the device failed: %s", error)
                return self._renew(slot)
            else:
                return True

    def _renew(self, slot: Slot) -> bool:
        """Replace a failed stream, which does no further work; returns whether that worked."""
        failed = slot.stream
        try:
            slot.stream = self._device.stream()
            failed.close()
        except TransferError:
            return slot.stream is not failed
        return True


class Staging:
    """The slots of one worker: `staging_bytes` of device memory, and as much pinned memory.

    All of it is allocated here, because CUDA may synchronize the whole device to allocate or free.
    During fetches that could wait for NCCL, which waits for a peer that waits the same way.

    A chunk holds at least `blocks` blocks of any layer, so every row of the cache. Raises
    `ConfigError`, which names the `setting`, if staging_bytes is less than two chunks per
    direction; `TransferError` if the memory cannot be allocated.
    """

    def __init__(
        self,
        device: Device,
        cache: BlockCache,
        staging_bytes: int,
        *,
        sends: bool = True,
        receives: bool = True,
        blocks: int = 1,
        pinned: bool = True,
        setting: str = SETTING,
    ) -> None:
        directions = int(sends) + int(receives)
        whole = cache.whole([])
        row = max(cache.row_bytes(index, whole) for index in range(len(cache.regions)))
        least = -(-blocks * row // 256) * 256
        share = staging_bytes // max(1, directions)
        self.chunk_bytes = min(max(least, _LARGEST_CHUNK), share // DEPTH) // 256 * 256
        if self.chunk_bytes < least:
            raise ConfigError(
                f"{setting}: {staging_bytes} — at least {DEPTH * directions * least} are needed: "
                f"{DEPTH} chunks for each direction, in every chunk {blocks} of one layer's blocks "
                f"of {row} bytes"
            )
        self.device = device
        device.use()
        count = share // (DEPTH * self.chunk_bytes)
        self.sending = self._slots(count if sends else 0, pinned)
        self.receiving = self._slots(count if receives else 0, pinned)

    @property
    def device_bytes(self) -> int:
        """Bytes allocated on the device."""
        return (self.sending.count + self.receiving.count) * DEPTH * self.chunk_bytes

    def close(self) -> None:
        """Free the idle slots."""
        self.sending.close()
        self.receiving.close()

    def outgoing(
        self,
        cache: BlockCache,
        blocks: Selection,
        deadline: Deadline,
        look: Callable[[], None] = look_at_nothing,
    ) -> Generator[Bytes, None, None]:
        """The bytes of a selection in wire order, in pieces of host memory.

        A piece is valid until the next one is requested, which is copied meanwhile. Close the
        iterator if you do not exhaust it; the cache is not read after that. look: called during
        waits; it ends them by raising.
        """
        move, wait = copy_plan.gather(cache, blocks), Wait(deadline, look)
        with self.sending.take(deadline, look) as slot:
            slot.stream.load(move)
            under_way: deque[tuple[Chunk, Bytes, Event]] = deque()
            for number, chunk in enumerate(move.chunks(self.chunk_bytes)):
                if len(under_way) == DEPTH:
                    yield from self._next(under_way, wait)
                memory, host = slot.chunks[number % DEPTH], slot.pinned[number % DEPTH]
                slot.stream.launch(chunk, to_shift=memory.address - chunk.at)
                slot.stream.copy(host.address, memory.address, chunk.size)
                under_way.append((chunk, host.array, slot.stream.record()))
            while under_way:
                yield from self._next(under_way, wait)

    def incoming(
        self,
        cache: BlockCache,
        blocks: Selection,
        deadline: Deadline,
        after: Event | None = None,
    ) -> Generator[Bytes, None, None]:
        """Pieces of host memory to be filled with the bytes of a selection, in wire order.

        A filled piece is copied into the blocks when the next one is requested, after the event
        `after`; when the iterator has ended, all blocks are complete. Close it if you do not
        exhaust it; the blocks are not written to after that.
        """
        move, wait = copy_plan.scatter(cache, blocks), Wait(deadline)
        with self.receiving.take(deadline) as slot:
            slot.stream.load(move)
            copied: deque[Event] = deque()
            for number, chunk in enumerate(move.chunks(self.chunk_bytes)):
                if len(copied) == DEPTH:
                    wait.until(copied.popleft().is_done)
                memory, host = slot.chunks[number % DEPTH], slot.pinned[number % DEPTH]
                yield host.array[: chunk.size]
                # Not on the stream: work that waits there cannot be cancelled at the deadline.
                if after is not None:
                    wait.until(after.is_done)
                slot.stream.copy(memory.address, host.address, chunk.size)
                slot.stream.launch(chunk, from_shift=memory.address - chunk.at)
                copied.append(slot.stream.record())
            while copied:
                wait.until(copied.popleft().is_done)

    def _next(
        self, under_way: deque[tuple[Chunk, Bytes, Event]], wait: Wait
    ) -> Generator[Bytes, None, None]:
        chunk, host, copied = under_way[0]
        wait.until(copied.is_done)
        yield host[: chunk.size]
        under_way.popleft()

    def _slots(self, count: int, pinned: bool) -> Slots:
        slots = []
        for _ in range(count):
            chunks = [self.device.memory(self.chunk_bytes) for _ in range(DEPTH)]
            host = [self.device.pinned(self.chunk_bytes) for _ in range(DEPTH * pinned)]
            slots.append(Slot(self.device.stream(), chunks, host))
        return Slots(self.device, slots)


def open_staging(
    cache: BlockCache,
    staging_bytes: int,
    *,
    sends: bool,
    receives: bool,
    blocks: int = 1,
    pinned: bool = True,
    setting: str = SETTING,
) -> Staging | None:
    """The slots of a worker whose cache is on a device; None for a cache in host memory.

    Raises `ConfigError` if the memory cannot be allocated.
    """
    if cache.on_host:
        return None
    try:
        return Staging(
            open_device(cache),
            cache,
            staging_bytes,
            sends=sends,
            receives=receives,
            blocks=blocks,
            pinned=pinned,
            setting=setting,
        )
    except TransferError as error:
        raise ConfigError(
            f"{setting}: {staging_bytes} — not available: {error}; cupy comes with `pip install "
            "disagg[gpu]`, memory of the GPU with a lower gpu_memory_utilization, pinned memory of "
            f"the host with a lower {setting}"
        ) from error
