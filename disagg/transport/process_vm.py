"""`process_vm_readv` over pieces of memory of any number and size: batches, short reads, errors.

Knows addresses and lengths, and nothing of blocks, leases or offers.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from disagg.errors import PeerLost, TransferError
from disagg.transport.base import Deadline
from disagg.transport.blocks import BlockCache, Ints, Selection

_IOV_MAX = 1024
# A call cannot be interrupted, so it must end soon: 64 MiB take 15 ms.
_CALL_BYTES = 64 << 20

Iovecs = npt.NDArray[np.uint64]


class Pieces:
    """Pieces of memory that make up a selection, in wire order, as one stream."""

    def __init__(self, addresses: Ints, lengths: Ints, per_region: list[int]) -> None:
        self._addresses, self._ends, self.per_region = addresses, np.cumsum(lengths), per_region
        self._begins = self._ends - lengths
        self.total = sum(per_region)

    @classmethod
    def of(cls, cache: BlockCache, addresses: list[int], blocks: Selection) -> Pieces:
        """The selection's pieces, with the cache's regions at these addresses."""
        every = cache.all_runs(blocks)
        addresses = [addresses[index] for index in cache.covered(blocks)]
        first, count = every[0], len(every)
        if all(runs is first for runs in every):
            return cls(
                (np.array(addresses)[:, None] + first.offsets).reshape(-1),
                np.tile(first.lengths, count),
                [int(first.lengths.sum())] * count,
            )
        return cls(
            np.concatenate([at + runs.offsets for at, runs in zip(addresses, every, strict=True)]),
            np.concatenate([runs.lengths for runs in every]),
            [int(runs.lengths.sum()) for runs in every],
        )

    def reach(self, at: int) -> int:
        """How far one call's iovecs reach from byte `at` of the stream."""
        first = int(np.searchsorted(self._ends, at, "right"))
        return int(self._ends[min(first + _IOV_MAX, len(self._ends)) - 1])

    def between(self, at: int, end: int) -> Iovecs:
        """Bytes [at, end) of the stream: uint64 [n, 2], addresses and lengths."""
        first = int(np.searchsorted(self._ends, at, "right"))
        some = slice(first, int(np.searchsorted(self._ends, end, "left")) + 1)
        begins = np.maximum(self._begins[some], at)
        lengths = np.minimum(self._ends[some], end) - begins
        starts = self._addresses[some] + (begins - self._begins[some])
        return np.stack([starts, lengths], axis=1).astype(np.uint64)


def read_span(
    pid: int, near: Pieces, far: Pieces, span: tuple[int, int], deadline: Deadline
) -> None:
    """Read bytes [span[0], span[1]) of the stream from process `pid`. Raises `TransferError`."""
    done, stop = span
    while done < stop:
        deadline.left()
        end = min(done + _CALL_BYTES, stop, near.reach(done), far.reach(done))
        done += read(pid, near.between(done, end), far.between(done, end))


def is_supported() -> bool:
    """Whether this system has the call at all."""
    return _readv is not None


def libc_function(name: str, returns: type, *takes: type) -> Callable[..., int] | None:
    # CDLL, not PyDLL: it lets go of the GIL for the time of a call.
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
    if _readv is None:
        raise TransferError("this system has no process_vm_readv", reason="process_memory")
    count = _readv(pid, near.ctypes.data, len(near), far.ctypes.data, len(far), 0)
    if count > 0:
        return count
    code = ctypes.get_errno() if count < 0 else errno.EFAULT
    if code == errno.ESRCH:
        raise PeerLost(f"the producer's process {pid} is gone")
    reason = "process_memory_denied" if code == errno.EPERM else "process_memory"
    raise TransferError(f"cannot read process {pid}: {os.strerror(code)}", reason=reason)
