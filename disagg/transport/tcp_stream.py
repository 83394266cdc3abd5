"""Bytes of a selection through a connected socket, from and to the cache's own memory.

Few and large system calls, each without the GIL: `sendmsg` and `recvmsg_into` over many pieces
at once, on a socket that blocks in the kernel. A timeout of Python's would make the socket
non-blocking, and every call as small as what just happens to lie in its buffer. The wait of
each call is bounded by the kernel instead (SO_RCVTIMEO, SO_SNDTIMEO), by the time that is left.

It never allocates for host memory, never asks the kernel to read pages after a call returned
(MSG_ZEROCOPY), and trusts nothing it received: the caller compares the checksums.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import xxhash

from disagg.errors import PeerLost
from disagg.transport.base import Deadline
from disagg.transport.blocks import BlockCache, Bytes, Selection

# Large enough that calls and wake-ups do not count (on busy cores 4 MiB moved a third more than
# 1 MiB), small enough to be hashed before it leaves the processor's cache; it also bounds what
# is still read of the cache after a stream was cut. The sizes of socket buffers are left to the
# kernel: to set them ends its own tuning, and it often allows less than it would have taken.
CHUNK = 4 << 20
# Device memory is copied at its best in larger pieces.
_STAGED = 8 << 20
_IOV_MAX = 1024  # of Linux and macOS
_TIMEVAL = struct.Struct("@ll")


def share(blocks: Selection, stream: int, streams: int) -> Selection:
    """What stream `stream` of `streams` carries: as many units as the others, in one row."""
    begin = blocks.count * stream // streams
    end = blocks.count * (stream + 1) // streams
    return replace(blocks, first=blocks.first + begin, count=end - begin)


def send_blocks(
    sock: socket.socket, cache: BlockCache, blocks: Selection, deadline: Deadline
) -> bytes:
    """Send a selection, region by region; returns the checksum (xxh3-128) of its bytes.

    Raises `PeerLost`. Nothing of the cache is read once it returned or raised.
    """
    checksum = xxhash.xxh3_128()
    sock.settimeout(None)
    for batch in _batches(_outgoing(cache, blocks)):
        for piece in batch:
            checksum.update(piece)
        _all(sock, sock.sendmsg, socket.SO_SNDTIMEO, batch, deadline)
    return checksum.digest()


def receive_blocks(
    sock: socket.socket, cache: BlockCache, blocks: Selection, deadline: Deadline
) -> bytes:
    """Fill a selection; returns the checksum of what arrived. Raises `PeerLost`."""
    checksum = xxhash.xxh3_128()
    sock.settimeout(None)

    def fill(pieces: list[Bytes]) -> None:
        for batch in _batches(pieces):
            _all(sock, receive, socket.SO_RCVTIMEO, batch, deadline)
            for piece in batch:
                checksum.update(piece)

    def receive(batch: list[memoryview]) -> int:
        return sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]

    if cache.on_host:
        fill(list(_host_pieces(cache, blocks)))
    else:
        for index, part in _parts(cache, blocks):
            staged = cache.staging(index, part)
            fill([staged])
            cache.scatter(index, part, staged)
    return checksum.digest()


def _outgoing(cache: BlockCache, blocks: Selection) -> Iterator[Bytes]:
    if cache.on_host:
        yield from _host_pieces(cache, blocks)
    else:
        for index, part in _parts(cache, blocks):
            yield from cache.gather(index, part)


def _host_pieces(cache: BlockCache, blocks: Selection) -> Iterator[Bytes]:
    for index, runs in enumerate(cache.all_runs(blocks)):
        yield from cache.cut(index, runs)


def _parts(cache: BlockCache, blocks: Selection) -> Iterator[tuple[int, Selection]]:
    """Region by region, parts of it that fit into one staging buffer, at least one unit each."""
    unit_bytes = cache.num_bytes(replace(blocks, count=1)) // len(cache.regions)
    step = max(1, _STAGED // max(1, unit_bytes))
    for index in range(len(cache.regions)):
        for first in range(0, blocks.count, step):
            count = min(step, blocks.count - first)
            yield index, replace(blocks, first=blocks.first + first, count=count)


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
