"""Bytes of a selection through a connected socket, from and to the cache's own memory.

Few and large system calls, each without the GIL: `sendmsg` and `recvmsg_into` over many pieces
at once, on a socket that blocks in the kernel. A timeout of Python's would make the socket
non-blocking, and every call as small as what just happens to lie in its buffer. The wait of
each call is bounded by the kernel instead (SO_RCVTIMEO, SO_SNDTIMEO), by the time that is left.

It never allocates, never asks the kernel to read pages after a call returned (MSG_ZEROCOPY), and
trusts nothing it received: the caller compares the checksums. Blocks on a device pass through the
worker's staging memory, piece by piece.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import xxhash

from disagg.errors import PeerLost
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Bytes, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.device.staging import Staging

# Large enough that calls and wake-ups do not count (on busy cores 4 MiB moved a third more than
# 1 MiB), small enough to be hashed before it leaves the processor's cache; it also bounds what
# is still read of the cache after a stream was cut. The sizes of socket buffers are left to the
# kernel: to set them ends its own tuning, and it often allows less than it would have taken.
CHUNK = 4 << 20
_IOV_MAX = 1024  # of Linux and macOS
_TIMEVAL = struct.Struct("@ll")


def share(blocks: Selection, stream: int, streams: int) -> Selection:
    """What stream `stream` of `streams` carries: as many units as the others, in one row."""
    begin = blocks.count * stream // streams
    end = blocks.count * (stream + 1) // streams
    return replace(blocks, first=blocks.first + begin, count=end - begin)


def send_blocks(
    sock: socket.socket,
    cache: BlockCache,
    blocks: Selection,
    deadline: Deadline,
    staging: Staging | None = None,
    look: Callable[[], None] = lambda: None,
) -> bytes:
    """Send a selection, region by region; returns the checksum (xxh3-128) of its bytes.

    `look` is called while it waits for staging memory, to raise what ends that. Raises
    `TransferError`. Nothing of the cache is read once it returned or raised.
    """
    checksum = xxhash.xxh3_128()
    sock.settimeout(None)

    def send(pieces: Iterable[Bytes]) -> None:
        for batch in _batches(pieces):
            for piece in batch:
                checksum.update(piece)
            _all(sock, sock.sendmsg, socket.SO_SNDTIMEO, batch, deadline)

    if staging is None:
        send(itertools.chain.from_iterable(cache.views(blocks)))
    else:
        with contextlib.closing(staging.outgoing(cache, blocks, deadline, look)) as staged:
            for piece in staged:
                send([piece])  # each by itself: it is overwritten when the next is asked for
    return checksum.digest()


def receive_blocks(sock: socket.socket, pieces: Iterable[list[Bytes]], deadline: Deadline) -> bytes:
    """Fill what `landing` gave; returns the checksum of what arrived. Raises `TransferError`."""
    checksum = xxhash.xxh3_128()
    sock.settimeout(None)

    def receive(batch: list[memoryview]) -> int:
        return sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]

    for some in pieces:
        for batch in _batches(some):
            _all(sock, receive, socket.SO_RCVTIMEO, batch, deadline)
            for piece in batch:
                checksum.update(piece)
    return checksum.digest()


@contextlib.contextmanager
def landing(
    cache: BlockCache, blocks: Selection, job: FetchJob, staging: Staging | None
) -> Iterator[Iterable[list[Bytes]]]:
    """Memory for the bytes of a selection, in wire order, for the time of the block: lists of
    pieces, each of which is full when the next is asked for. Nothing is written afterwards.

    Waits for staging memory before the producer is asked to send, which then takes its own: so who
    sends never waits for who receives, and no ring of workers waits for each other.
    """
    if staging is None:
        yield [list(itertools.chain.from_iterable(cache.views(blocks)))]
        return
    with contextlib.closing(staging.incoming(cache, blocks, job.deadline, job.after)) as staged:
        first = list(itertools.islice(staged, 1))
        yield ([piece] for piece in itertools.chain(first, staged))


def _batches(pieces: Iterable[Bytes]) -> Iterator[list[memoryview]]:
    """The same bytes in the same order, at most `CHUNK` of them and IOV_MAX pieces a time."""
    batch: list[memoryview] = []
    room = CHUNK
    for piece in pieces:
        rest = piece.data
        while len(rest) > room:
            yield [*batch, rest[:room]]
            rest = rest[room:]
            batch, room = [], CHUNK
        batch.append(rest)
        room -= len(rest)
        if room == 0 or len(batch) == _IOV_MAX:
            yield batch
            batch, room = [], CHUNK
    if batch:
        yield batch


def _all(
    sock: socket.socket,
    call: Callable[[list[memoryview]], int],
    option: int,
    batch: list[memoryview],
    deadline: Deadline,
) -> None:
    """Repeat the call until it took the whole batch."""
    while batch:
        left = deadline.left()
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, _timeval(left))
            count = call(batch)
        except BlockingIOError as error:
            raise PeerLost("no progress before the deadline", reason="deadline") from error
        except OSError as error:
            raise PeerLost(f"connection lost amid the blocks: {error}") from error
        if count == 0:
            raise PeerLost("connection closed by the peer amid the blocks")
        batch = _rest(batch, count)


def _rest(batch: list[memoryview], count: int) -> list[memoryview]:
    """What remains of the pieces after their first `count` bytes."""
    if count == sum(map(len, batch)):
        return []
    for index, piece in enumerate(batch):
        if count < len(piece):
            return [piece[count:], *batch[index + 1 :]]
        count -= len(piece)
    return []


def _timeval(seconds: float) -> bytes:
    # Zero would mean no limit at all.
    whole, micros = divmod(max(1, int(seconds * 1e6)), 1_000_000)
    return _TIMEVAL.pack(whole, micros)
