"""Writes the files: a pool of threads, each with its own host buffer, and the pending writes.

Memory is bounded: a file of any length passes through one buffer in pieces. While all threads are
busy, saves wait in the device's blocks, which the scheduler keeps until they were read.

For every save, whatever its result, three things happen once each: its file or its error file gets
its name, its blocks are released, and its readers are woken.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch

from disagg.connector.hidden_states import naming, pending_writes, tensor_file
from disagg.connector.hidden_states.device import DeviceBlocks
from disagg.errors import HiddenStatesFailed
from disagg.private_files import PrivateFolder
from disagg.safe_logging import foreign
from disagg.transport.blocks import copy_alone

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LONGEST_ID = 1024


@dataclass(frozen=True)
class Save:
    """One request's file. block_ids: its states' blocks, in order; the scheduler keeps them.

    problem: why there are no states; then only the error file is written.
    """

    request_id: str
    path: str
    token_ids: Sequence[int]
    block_ids: list[int]
    problem: str | None = None


@dataclass(frozen=True)
class Ended:
    """A save's result. seconds: since its submission. reason: a metric label."""

    num_bytes: int
    seconds: float
    reason: str | None = None


class HiddenStatesWriter:
    """Writes one life's files into one folder."""

    def __init__(
        self,
        folder: PrivateFolder,
        blocks: DeviceBlocks,
        *,
        num_threads: int,
        layer_ids: Sequence[int],
    ) -> None:
        """Raises OSError if the folder can't be used, or its files can't be locked."""
        self.folder, self.life = folder, naming.new_life()
        self._blocks = blocks
        self._layer_ids = ",".join(map(str, layer_ids))
        self._pending = pending_writes.PendingWrites(folder, self.life)
        pending_writes.sweep(folder)
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(num_threads):
            self._buffers.put(blocks.new_buffer())
        self._threads = ThreadPoolExecutor(
            num_threads, "disagg-hidden-states", initializer=copy_alone
        )
        self._read: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._unlocked: set[int] = set()
        self._left = 0
        self._idle = threading.Condition()

    # ---- called by the model loop, which it never blocks -----------------------------------

    def promise(self, number: int) -> None:
        """Mark this number's file as pending, before its path can be known."""
        try:
            self._pending.begin(number)
        except OSError as error:
            # Readers could not wait for this file, so its save has to fail.
            self._unlocked.add(number)
            logger.warning(
                "hidden states %d: their lock failed, they will not be written: %s", number, error
            )

    def withdraw(self, number: int) -> None:
        """This file will not be written; no answer contains its path."""
        self._unlocked.discard(number)
        self._pending.end(number)

    def submit(self, save: Save) -> None:
        """Write it in a thread. Its blocks must not change before `take_read` returns it."""
        with self._idle:
            self._left += 1
        self._threads.submit(self._run, save, self._blocks.mark(), time.monotonic())

    def take_read(self) -> set[str]:
        """Requests whose blocks were read since the last call."""
        return set(_drain(self._read))

    def take_ended(self) -> list[Ended]:
        """Saves that ended since the last call."""
        return _drain(self._ended)

    def close(self, timeout: float) -> None:
        """Finish submitted saves within `timeout` seconds; readers of the others get an error."""
        with self._idle:
            if not self._idle.wait_for(lambda: self._left == 0, timeout):
                logger.warning("%d hidden states not written: the engine ends", self._left)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pending.close()

    # ---- in threads of ours ----------------------------------------------------------------

    def _run(self, save: Save, written: torch.cuda.Event | None, submitted: float) -> None:
        target = naming.parse(save.path)
        num_bytes, reason = 0, None
        with ExitStack() as finally_, ExitStack() as held:
            finally_.callback(self._done)
            finally_.callback(self._pending.end, target.number)
            if save.block_ids:
                held.callback(self._read.put, save.request_id)
            try:
                self._check(save, target.number)
                num_bytes = self._write(save, target, written, held)
            except HiddenStatesFailed as error:
                reason = "not_computed"
                self._write_error(save, target, str(error))
            except OSError as error:
                reason = "storage"
                self._write_error(save, target, str(error))
            except Exception as error:
                reason = "internal"
                logger.exception(
                    "hidden states of %s failed unexpectedly", foreign(save.request_id)
                )
                self._write_error(save, target, repr(error))
            self._ended.put(Ended(num_bytes, time.monotonic() - submitted, reason))

    def _check(self, save: Save, number: int) -> None:
        if save.problem is not None:
            raise HiddenStatesFailed(save.problem)
        if number in self._unlocked:
            self._unlocked.discard(number)
            raise OSError(f"no file could be locked in {self.folder.path}, see the engine's log")

    def _write(
        self,
        save: Save,
        target: naming.Written,
        written: torch.cuda.Event | None,
        held: ExitStack,
    ) -> int:
        """Returns the file's size. Closes `held` as soon as the blocks were read."""
        tokens = torch.tensor(save.token_ids, dtype=torch.int64)
        shape = (len(tokens), *self._blocks.token_shape)
        specs = [
            tensor_file.Spec("hidden_states", self._blocks.dtype, shape),
            tensor_file.Spec("token_ids", torch.int64, (len(tokens),)),
        ]
        # Ids may contain invalid UTF-8, which other readers of the format would reject.
        shown = save.request_id[:_LONGEST_ID].encode("utf-8", "replace").decode()
        metadata = {"format": "pt", "request_id": shown, "layer_ids": self._layer_ids}
        head = tensor_file.header(specs, metadata)
        pending_writes.make_folder(self.folder)
        temporary = naming.temporary_name(self.life, target.number)
        buffer = self._buffers.get()
        try:
            with tensor_file.Draft(self.folder, temporary, target.path.name) as draft:
                draft.write(head)
                left, step = len(tokens), self._blocks.blocks_per_read
                for start in range(0, len(save.block_ids), step):
                    ids = save.block_ids[start : start + step]
                    piece = self._blocks.read(ids, written, buffer)[:left]
                    left -= len(piece)
                    if left == 0:
                        held.close()
                    draft.write(tensor_file.as_bytes(piece))
                if left:
                    raise HiddenStatesFailed(f"{left} of {len(tokens)} tokens have no block")
                draft.write(tensor_file.as_bytes(tokens))
        finally:
            self._buffers.put(buffer)
        return len(head) + sum(spec.num_bytes for spec in specs)

    def _write_error(self, save: Save, target: naming.Written, reason: str) -> None:
        """Write the error file. If that fails too, readers get an error without a reason."""
        logger.warning("no hidden states of %s: %s", foreign(save.request_id), foreign(reason))
        temporary = naming.temporary_name(self.life, target.number)
        try:
            with tensor_file.Draft(self.folder, temporary, target.error.name) as draft:
                draft.write(reason.encode("utf-8", "replace"))
        except OSError as error:
            logger.warning("nor could that be written to %s: %s", target.error, error)

    def _done(self) -> None:
        with self._idle:
            self._left -= 1
            self._idle.notify_all()


def _drain(source: queue.SimpleQueue[T]) -> list[T]:
    taken = []
    while not source.empty():
        taken.append(source.get_nowait())
    return taken
