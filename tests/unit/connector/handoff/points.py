"""Points in a transfer at which its thread may be held for a while, or fail.

Between two points other things happen: leases end, blocks are used again, engines restart. A point
is a wrapper around a function of the product, which then runs as it is.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from disagg.connector.handoff.consumer_worker import ConsumerWorker
from disagg.errors import TransferError
from disagg.transport import fetch, shared_storage
from disagg.transport.control.server import _Session
from disagg.transport.host import process_vm
from disagg.transport.one_sided import lease_board, process_memory
from disagg.transport.tcp import stream

_LONGEST_S = 3.0
_MOST_HELD = 6


class Points:
    """Where threads are held now. All of a process's episodes share one; safe from any thread.

    holds, fails: how often a thread that passes a point is held there, or fails there. spoils: how
    often a handoff file is damaged or shortened before it is read.
    """

    def __init__(self) -> None:
        self.holds = self.fails = self.spoils = 0.0
        self.passed: Counter[str] = Counter()
        self._random = random.Random()
        self._held: list[threading.Event] = []
        self._lock = threading.Lock()

    def begin(self, seed: int, holds: float, fails: float, spoils: float) -> None:
        """For one episode."""
        with self._lock:
            self._random.seed(seed)
            self.holds, self.fails, self.spoils = holds, fails, spoils

    def end(self) -> None:
        """Let all threads go, and hold none from now on."""
        with self._lock:
            self.holds = self.fails = self.spoils = 0.0
        self.let_go(1.0)

    def let_go(self, share: float) -> None:
        """Let each thread that is held go on with this probability."""
        with self._lock:
            for held in list(self._held):
                if self._random.random() < share:
                    self._held.remove(held)
                    held.set()

    @property
    def held(self) -> int:
        """How many threads wait at a point."""
        return len(self._held)

    def reach(self, point: str, *, may_fail: bool = False) -> None:
        """Called by a transfer's thread. Raises `TransferError` where the transfer is to fail."""
        if not self.holds and not self.fails:
            return
        with self._lock:
            if may_fail and self._random.random() < self.fails:
                self.passed[f"failed: {point}"] += 1
                raise TransferError(f"made to fail: {point}")
            if len(self._held) >= _MOST_HELD or self._random.random() >= self.holds:
                return
            self.passed[f"held: {point}"] += 1
            held = threading.Event()
            self._held.append(held)
        if not held.wait(_LONGEST_S):
            with self._lock:
                if held in self._held:
                    self._held.remove(held)

    def meet_file(self, descriptor: int) -> None:
        """A file that is about to be read may be another one then."""
        with self._lock:
            if self._random.random() >= self.spoils:
                return
            at, shorter = self._random.random(), self._random.random() < 0.3
        with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
            at = int(at * os.fstat(descriptor).st_size)
            if shorter:
                file.truncate(at)
                return
            byte = os.pread(descriptor, 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 0x40]), at)


def install(patch: pytest.MonkeyPatch) -> Points:
    """Put points into the product, for as long as the patches last."""
    points = Points()
    _read_in_halves(patch, points)
    _around(patch, points, lease_board, "look_up", before="look up", after="looked up")
    _around(patch, points, lease_board, "still_there", before="look again")
    _around(patch, points, fetch, "_release", before="release", may_fail=True)
    _around(patch, points, shared_storage, "_write_all", before="write file", may_fail=True)
    _around(patch, points, shared_storage, "_read_all", before="read file", may_fail=True)
    _around(patch, points, ConsumerWorker, "_load", before="load", after="loaded")
    _around(patch, points, _Session, "_acquire", before="acquire", after="acquired")
    _around(patch, points, _Session, "_fetch", before="fetch", after="fetched")
    _around(patch, points, _Session, "_follow", before="follow", after="followed")
    _around(patch, points, _Session, "_await", before="await", after="awaited")
    _around(patch, points, _Session, "_proceed", before="proceed", after="proceeded")
    _around(patch, points, _Session, "_release", before="answer release")
    _send_in_halves(patch, points)
    _spoil_files(patch, points)
    return points


def _around(
    patch: pytest.MonkeyPatch,
    points: Points,
    home: Any,
    name: str,
    *,
    before: str = "",
    after: str = "",
    may_fail: bool = False,
) -> None:
    real: Callable[..., Any] = getattr(home, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            points.reach(before, may_fail=may_fail)
        result = real(*args, **kwargs)
        if after:
            points.reach(after)
        return result

    patch.setattr(home, name, wrapped)


def _read_in_halves(patch: pytest.MonkeyPatch, points: Points) -> None:
    real = process_vm.read_span

    def read_span(pid: int, near: Any, far: Any, span: tuple[int, int], deadline: Any) -> None:
        middle = (span[0] + span[1]) // 2
        points.reach("copy", may_fail=True)
        real(pid, near, far, (span[0], middle), deadline)
        points.reach("amid copy", may_fail=True)
        real(pid, near, far, (middle, span[1]), deadline)

    patch.setattr(process_memory, "read_span", read_span)


def _send_in_halves(patch: pytest.MonkeyPatch, points: Points) -> None:
    """Both ends of a data connection move each batch in two."""
    real = stream._batches

    def batches(pieces: Any) -> Iterator[Sequence[memoryview]]:
        for batch in real(pieces):
            middle = (len(batch) + 1) // 2
            points.reach("send or receive", may_fail=True)
            yield batch[:middle]
            if batch[middle:]:
                points.reach("amid send or receive", may_fail=True)
                yield batch[middle:]

    patch.setattr(stream, "_batches", batches)


def _spoil_files(patch: pytest.MonkeyPatch, points: Points) -> None:
    real = shared_storage.ProducersFiles._load

    def load(self: Any, job: Any, file: Any, descriptor: int) -> None:
        points.meet_file(descriptor)
        real(self, job, file, descriptor)

    patch.setattr(shared_storage.ProducersFiles, "_load", load)
