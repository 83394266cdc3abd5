"""`process_vm_readv` over any number of memory pieces: batches, short reads, errors.

Deals in addresses and lengths; leases and offers are not its concern.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from disagg.errors import PeerLost, TransferError
from disagg.transport.blocks import BlockCache, Ints, Selection
from disagg.transport.deadline import Deadline

_IOV_MAX = 1024
# A call cannot be interrupted, so it must end soon: 64 MiB take 15 ms.
_CALL_BYTES = 64 << 20

Iovecs = npt.NDArray[np.uint64]
_IOVEC_BYTES = 16
_TwoIovecs = ctypes.c_uint64 * 4


class Pieces:
    """The memory pieces of a selection, in wire order, as one stream of bytes.

    addresses: one per piece. lengths: one per piece, or one number if all are equal.
    """

    def __init__(self, addresses: Ints, lengths: Ints | int, per_region: list[int]) -> None:
        self._addresses, self.per_region = addresses, per_region
        self.total = sum(per_region)
        self._each = lengths if isinstance(lengths, int) else 0
        if not isinstance(lengths, int):
            self._ends = np.cumsum(lengths)
            self._begins = self._ends - lengths

    @classmethod
    def of(cls, cache: BlockCache, addresses: Ints, blocks: Selection) -> Pieces:
        """The selection's pieces, with the cache's regions at these addresses."""
        addresses = addresses[slice(*(blocks.regions or (None,)))]
        # The common case, with few numpy calls: each takes 10 to 20 us when cold.
        if (alike := cache.alike(blocks)) is not None:
            each = len(alike.begins) * alike.length
            every = (addresses[:, None] + alike.begins).reshape(-1)
            return cls(every, alike.length, [each] * len(addresses))
        runs = cache.all_runs(blocks)
        return cls(
            np.concatenate([at + one.offsets for at, one in zip(addresses, runs, strict=True)]),
            np.concatenate([one.lengths for one in runs]),
            [int(one.lengths.sum()) for one in runs],
        )

    def reach(self, at: int) -> int:
        """How far one call's iovecs reach from byte `at` of the stream."""
        if self._each:
            return min((at // self._each + _IOV_MAX) * self._each, self.total)
        first = int(np.searchsorted(self._ends, at, "right"))
        return int(self._ends[min(first + _IOV_MAX, len(self._ends)) - 1])

    def between(self, at: int, end: int) -> Iovecs:
        """Bytes [at, end) of the stream: uint64 [n, 2], addresses and lengths."""
        if self._each:
            return self._alike_between(at, end)
        first = int(np.searchsorted(self._ends, at, "right"))
        some = slice(first, int(np.searchsorted(self._ends, end, "left")) + 1)
        begins = np.maximum(self._begins[some], at)
        lengths = np.minimum(self._ends[some], end) - begins
        starts = self._addresses[some] + (begins - self._begins[some])
        return np.stack([starts, lengths], axis=1).astype(np.uint64)

    def _alike_between(self, at: int, end: int) -> Iovecs:
        first, stop = at // self._each, -(-end // self._each)
        found = np.empty((stop - first, 2), np.uint64)
        found[:, 0] = self._addresses[first:stop]
        found[:, 1] = self._each
        skipped = at - first * self._each
        found[0, 0] += skipped
        found[0, 1] -= skipped
        found[-1, 1] -= stop * self._each - end
        return found


def read_span(
    pid: int, near: Pieces, far: Pieces, span: tuple[int, int], deadline: Deadline
) -> None:
    """Read bytes [span[0], span[1]) of the stream from process `pid`. Raises `TransferError`."""
    done, stop = span
    while done < stop:
        deadline.left()
        end = min(done + _CALL_BYTES, stop, near.reach(done), far.reach(done))
        done += read(pid, near.between(done, end), far.between(done, end))


def peek(pid: int, at: int, length: int) -> bytes:
    """These bytes of process `pid`, all of them. Raises `TransferError`."""
    # Without numpy, whose cold call takes as long as all the rest.
    found = ctypes.create_string_buffer(length)
    iovecs = _TwoIovecs(ctypes.addressof(found), length, at, length)
    near = ctypes.addressof(iovecs)
    if _read(pid, (near, 1), (near + _IOVEC_BYTES, 1)) != length:
        raise TransferError(f"process {pid} has less memory than that", reason="process_memory")
    return found.raw


def is_supported() -> bool:
    """Whether this system has `process_vm_readv`."""
    return _readv is not None


def libc_function(name: str, returns: type, *takes: type) -> Callable[..., int] | None:
    # CDLL, not PyDLL: it releases the GIL during a call.
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype, function.argtypes = returns, takes
    return function


_vector = (ctypes.c_void_p, ctypes.c_ulong)
_readv = libc_function(
    "process_vm_readv", ctypes.c_ssize_t, ctypes.c_int, *_vector, *_vector, ctypes.c_ulong
)


def read(pid: int, near: Iovecs, far: Iovecs) -> int:
    """Read from process `pid`; returns the number of bytes, which may be fewer than asked for."""
    return _read(pid, (near.ctypes.data, len(near)), (far.ctypes.data, len(far)))


def _read(pid: int, near: tuple[int, int], far: tuple[int, int]) -> int:
    """near, far: address and number of the iovecs."""
    if _readv is None:
        raise TransferError("this system has no process_vm_readv", reason="process_memory")
    count = _readv(pid, *near, *far, 0)
    if count > 0:
        return count
    code = ctypes.get_errno() if count < 0 else errno.EFAULT
    if code == errno.ESRCH:
        raise PeerLost(f"the producer's process {pid} is gone")
    reason = "process_memory_denied" if code == errno.EPERM else "process_memory"
    raise TransferError(f"cannot read process {pid}: {os.strerror(code)}", reason=reason)
