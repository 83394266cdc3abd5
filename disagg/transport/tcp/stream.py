"""Sends and receives a selection's bytes over a connected socket, from and to the cache's memory.

It uses few, large system calls without the GIL: `sendmsg` and `recvmsg_into` over many pieces at
once, on a socket that blocks in the kernel. Python's socket timeout would make the socket
non-blocking, and every call as small as the socket buffer's current content. So the kernel bounds
each call instead (SO_RCVTIMEO, SO_SNDTIMEO), by the time left.

It never allocates, and never lets the kernel read pages after a call has returned (MSG_ZEROCOPY).
It does not validate received bytes: the caller compares the checksums. Blocks on a device pass
through the worker's staging memory, piece by piece.
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

# Large enough that calls and wake-ups cost little (on busy cores 4 MiB chunks moved a third more
# than 1 MiB), small enough to be hashed while in the processor's cache. It also bounds how much of
# the cache is still read after a stream was cut. The kernel sizes the socket buffers: setting them
# would end its own tuning, and it often allows less than it would choose itself.
CHUNK = 4 << 20
_IOV_MAX = 1024  # of Linux and macOS
_TIMEVAL = struct.Struct("@ll")


def share(blocks: Selection, stream: int, streams: int) -> Selection:
    """The part that stream `stream` of `streams` carries: consecutive units, equally divided."""
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

    look: called while it waits for staging memory; it ends the wait by raising. Raises
    `TransferError`. The cache is not read after it returned or raised.
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
                send([piece])  # one at a time: the next piece overwrites it
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
    """Memory for the bytes of a selection, in wire order: lists of pieces. The caller fills each
    list before it requests the next. Nothing is written after the context.

    It waits for staging memory before the producer is asked to send and takes its own. So a sender
    never waits for a receiver, and no cycle of workers can deadlock.
    """
    if staging is None:
        yield [list(itertools.chain.from_iterable(cache.views(blocks)))]
        return
    with contextlib.closing(staging.incoming(cache, blocks, job.deadline, job.after)) as staged:
        first = list(itertools.islice(staged, 1))
        yield ([piece] for piece in itertools.chain(first, staged))


def _batches(pieces: Iterable[Bytes]) -> Iterator[list[memoryview]]:
    """The same bytes in the same order, in batches of at most `CHUNK` bytes and IOV_MAX pieces."""
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
    """Repeat the call until the whole batch is done."""
    while batch:
        left = deadline.left()
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, _timeval(left))
            count = call(batch)
        except BlockingIOError as error:
            raise PeerLost("no progress before the deadline", reason="deadline") from error
        except OSError as error:
            raise PeerLost(f"connection lost during the transfer: {error}") from error
        if count == 0:
            raise PeerLost("connection closed by the peer during the transfer")
        batch = _rest(batch, count)


def _rest(batch: list[memoryview], count: int) -> list[memoryview]:
    """The pieces without their first `count` bytes."""
    if count == sum(map(len, batch)):
        return []
    for index, piece in enumerate(batch):
        if count < len(piece):
            return [piece[count:], *batch[index + 1 :]]
        count -= len(piece)
    return []


def _timeval(seconds: float) -> bytes:
    # Zero would mean no limit.
    whole, micros = divmod(max(1, int(seconds * 1e6)), 1_000_000)
    return _TIMEVAL.pack(whole, micros)
