"""What only process memory has: whom it takes for readable, and how it cuts its system calls."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transport import caches
from transport.caches import Shape
from transport.offers import changed, gone
from transport.other_user import REFUSED, look_as_another_user
from transport.worker import CONTEXT

from disagg.errors import DataCorrupt, PeerLost, TransferError
from disagg.transport.base import FetchJob, RemoteCache
from disagg.transport.blocks import BlockCache, Region, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.host import process_vm
from disagg.transport.one_sided import process_memory
from disagg.transport.one_sided.process_memory import ProcessMemoryReceiver, ProcessMemorySender

SHAPE = Shape(blocks=40, heads=4, layout="BLNHC")


def ends(shape: Shape = SHAPE) -> tuple[ProcessMemorySender, ProcessMemoryReceiver]:
    """Both ends here: a process may read itself, by the very same call."""
    sender = ProcessMemorySender(caches.make(shape, 1))
    return sender, ProcessMemoryReceiver(caches.make(shape, None))


def opened(receiver: ProcessMemoryReceiver, sender: ProcessMemorySender) -> RemoteCache:
    found = receiver.open(sender.offer())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (lambda: {"boot": "0" * 36}, "another host"),
        (lambda: {"pid_namespace": 1}, "another host or in another pid namespace"),
        (lambda: {"pid": gone()}, "gone"),
        (lambda: {"pid": -1}, "gone"),
        (lambda: {"pid": os.getppid()}, "gone|cannot read|another process"),
        (lambda: {"started": 1}, "gone"),
        (lambda: {"token": bytes(16)}, "another process"),
        (lambda: {"token_at": 4096}, "Bad address"),
        (lambda: {"token_at": -1}, "Bad address"),
        (lambda: {"regions": b""}, "no sense"),
        (lambda: {"regions": bytes(63)}, "no sense"),
        (lambda: {"regions": bytes(64)}, "no sense"),
    ],
)
def test_not_usable(
    fields: Callable[[], dict[str, Any]], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = ends()
    offer = sender.offer()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert not receiver.open(changed(offer, **fields()))
    (line,) = {record.getMessage() for record in caplog.records}
    assert len(caplog.records) == 1
    assert re.search(why, line)
    assert receiver.open(offer)


def test_caches_that_lie_on_a_device() -> None:
    sender, receiver = ends()
    # Stands for any memory that is not the host's.
    meta = Region("x", torch.empty(4, 1, 2, 8, dtype=torch.uint8, device="meta"), "U8")
    assert ProcessMemorySender(BlockCache([meta])).offer() == b""
    assert not ProcessMemoryReceiver(BlockCache([meta])).open(sender.offer())
    assert not receiver.open(b"")


def test_a_closed_sender_is_not_usable() -> None:
    sender, receiver = ends()
    assert receiver.open(sender.offer()) is not None
    sender.close()
    assert not receiver.open(sender.offer())


def test_another_users_process_is_not_usable() -> None:
    if os.getuid() != 0:
        pytest.skip("needs another user")
    sender, _ = ends()
    child = CONTEXT.Process(target=look_as_another_user, args=(sender.offer(), SHAPE), daemon=True)
    child.start()
    child.join(20)
    assert child.exitcode == REFUSED


@pytest.mark.parametrize("calls", [1, 7, 64, 4096])
@pytest.mark.parametrize("iovecs", [1, 2, 5, 1024])
def test_any_cut_into_calls(monkeypatch: pytest.MonkeyPatch, calls: int, iovecs: int) -> None:
    """Pieces of both sides end at different bytes; no call may take too many of either."""
    monkeypatch.setattr(process_vm, "_CALL_BYTES", calls * 64)
    monkeypatch.setattr(process_vm, "_IOV_MAX", iovecs)
    theirs, ours = Shape(blocks=20, layout="BLHNC"), Shape(blocks=20, tokens=4, layout="BLHNC")
    sender = ProcessMemorySender(caches.make(theirs, 1))
    receiver = ProcessMemoryReceiver(cache := caches.make(ours, None))
    remote = opened(receiver, sender)
    read, most = process_vm.read, [0, 0]

    def counted(pid: int, near: Any, far: Any) -> int:
        most[:] = max(most[0], len(near)), max(most[1], len(far))
        assert near[:, 1].sum() == far[:, 1].sum() <= calls * 64
        return read(pid, near, far)

    monkeypatch.setattr(process_vm, "read", counted)
    answer = sender.send(Selection([7, 8, 3, 19], 4, 1, 5), b"", Deadline.after(5))
    job = FetchJob(Selection([1, 9, 10, 2, 18], 4, 0, 5), Deadline.after(5))
    assert remote.receive(job, answer) == 5 * 4 * 2 * 64 * 3
    assert 1 <= max(most) <= iovecs
    for index in range(3):
        sent = caches.tokens(sender._cache, index, [7, 8, 3, 19])[4:24]
        assert caches.tokens(cache, index, [1, 9, 10, 2, 18]).equal(sent)
    assert caches.untouched(cache, but=[1, 9, 10, 2, 18])


def test_pieces_are_a_stream() -> None:
    generator = random.Random(5)
    lengths = np.array([generator.randint(1, 9) for _ in range(3000)])
    addresses = np.arange(3000) * 100
    pieces = process_vm.Pieces(addresses, lengths, [int(lengths.sum())])
    stream = np.concatenate([at + np.arange(n) for at, n in zip(addresses, lengths, strict=True)])
    for _ in range(200):
        at = generator.randrange(pieces.total)
        end = generator.randint(at + 1, pieces.reach(at))
        iovecs = pieces.between(at, end).astype(np.int64)
        assert len(iovecs) <= 1024
        assert (iovecs[:, 1] > 0).all()
        found = np.concatenate([begin + np.arange(n) for begin, n in iovecs])
        assert np.array_equal(found, stream[at:end])


def test_short_reads_go_on_where_they_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends()
    remote = opened(receiver, sender)
    read, generator = process_vm.read, random.Random(6)

    def short(pid: int, near: Any, far: Any) -> int:
        near, far = near[:1].copy(), far[:1].copy()
        near[0, 1] = far[0, 1] = generator.randint(1, int(min(near[0, 1], far[0, 1])))
        return read(pid, near, far)

    monkeypatch.setattr(process_vm, "read", short)
    answer = sender.send(sender._cache.whole([4, 5, 1]), b"", Deadline.after(5))
    remote.receive(FetchJob(receiver._cache.whole([2, 1, 9]), Deadline.after(5)), answer)
    assert caches.same(
        caches.prompts(sender._cache, [4, 5, 1]), caches.prompts(receiver._cache, [2, 1, 9])
    )


def test_memory_that_is_no_longer_there() -> None:
    """A region whose last page is not mapped: the first blocks are read, then it ends."""
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 4 * page)
    memory = torch.frombuffer(area, dtype=torch.uint8).view(4, 1, 1, page)
    sender = ProcessMemorySender(BlockCache([Region("x", memory, "U8")]))
    receiver = ProcessMemoryReceiver(
        BlockCache([Region("x", torch.zeros(4, 1, 1, page, dtype=torch.uint8), "U8")])
    )
    remote = opened(receiver, sender)
    answer = sender.send(sender._cache.whole(range(4)), b"", Deadline.after(5))
    job = FetchJob(receiver._cache.whole(range(4)), Deadline.after(5))
    libc = ctypes.CDLL(None)
    where = ctypes.c_void_p(memory.data_ptr() + 3 * page)
    assert libc.mprotect(where, page, 0) == 0
    try:
        with pytest.raises(TransferError, match=os.strerror(errno.EFAULT)) as error:
            remote.receive(job, answer)
        assert error.value.reason == "process_memory"
    finally:
        libc.mprotect(where, page, 3)
    assert remote.receive(job, answer) == 4 * page


@pytest.mark.parametrize(
    ("named", "mine"),
    [
        (Selection([1, 2], 8, 0, 2), Selection([1], 8, 0, 1)),
        (Selection([1], 8, 0, 1), Selection([1, 2], 8, 0, 2)),
        (Selection([1], 8, 0, 1), Selection([1], 4, 0, 2)),
        (Selection([1], 8, 0, 1, (0, 2)), Selection([1], 8, 0, 1, (0, 1))),
    ],
)
def test_sides_that_mean_different_things(named: Selection, mine: Selection) -> None:
    sender, receiver = ends()
    remote = opened(receiver, sender)
    answer = sender.send(named, b"", Deadline.after(5))
    with pytest.raises(DataCorrupt):
        remote.receive(FetchJob(mine, Deadline.after(5)), answer)
    assert caches.untouched(receiver._cache, but=[])


@pytest.mark.parametrize(
    "shape", [Shape(heads=4, layers=2), Shape(heads=4, layers=4), Shape(heads=8, content=32)]
)
def test_caches_that_differ(shape: Shape) -> None:
    """In their layers, and in what a head and token takes; the last are as many bytes."""
    sender, _ = ends()
    _, receiver = ends(shape)
    remote = opened(receiver, sender)
    answer = sender.send(Selection([1], 8, 0, 1), b"", Deadline.after(5))
    with pytest.raises(DataCorrupt, match="same selection"):
        remote.receive(FetchJob(receiver._cache.whole([1]), Deadline.after(5)), answer)
    assert caches.untouched(receiver._cache, but=[])


@pytest.mark.parametrize("regions", [(0, 4), (3, 4), (-1, 2), (2, 2), (2, 1)])
def test_regions_outside_of_the_offer_are_never_read(regions: tuple[int, int]) -> None:
    sender, receiver = ends()
    remote = opened(receiver, sender)
    content = msgspec.msgpack.decode(sender.send(Selection([1], 8, 0, 1), b"", Deadline.after(5)))
    content[6] = regions
    job = FetchJob(receiver._cache.whole([1]), Deadline.after(5))
    with pytest.raises(DataCorrupt, match="regions"):
        remote.receive(job, msgspec.msgpack.encode(content))


@pytest.mark.parametrize("block", [-1, 40, 1 << 30])
def test_blocks_outside_of_the_offer_are_never_read(block: int) -> None:
    sender, receiver = ends()
    remote = opened(receiver, sender)
    content = msgspec.msgpack.decode(sender.send(Selection([1], 8, 0, 1), b"", Deadline.after(5)))
    content[1] = np.array([block], np.int32).tobytes()
    job = FetchJob(receiver._cache.whole([1]), Deadline.after(5))
    with pytest.raises(DataCorrupt, match="outside"):
        remote.receive(job, msgspec.msgpack.encode(content))


def test_an_answer_names_only_what_it_must() -> None:
    sender, _ = ends()
    every = list(range(sender._cache.num_blocks))
    few = sender._cache.within(every, 4, ((9, 14),))
    assert list(few.block_ids) == every[4:7]
    assert len(sender.send(few, b"", Deadline.after(5))) < 60
    wide = np.zeros((1, 1, 1, 1), np.uint8)
    cache = BlockCache([Region("x", torch.from_numpy(wide), "U8")])
    with pytest.raises(TransferError) as error:
        ProcessMemorySender(cache).send(cache.whole([0] * 300_000), b"", Deadline.after(5))
    assert error.value.reason == "too_large"


def test_deadline_is_looked_at_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends()
    remote = opened(receiver, sender)
    answer = sender.send(sender._cache.whole([1]), b"", Deadline.after(5))
    with pytest.raises(PeerLost) as error:
        remote.receive(FetchJob(receiver._cache.whole([1]), Deadline.after(-1)), answer)
    assert error.value.reason == "deadline"


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [1, 31, 16 << 20, (16 << 20) + 5])
def test_threads_read_every_byte_once(total: int, threads: int) -> None:
    spans = process_memory._spans(total, threads)
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
    assert spans[-1][1] == total
    assert all(begin <= end for begin, end in spans)
