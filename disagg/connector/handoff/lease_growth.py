"""When blocks of a growing lease are final in a worker: once all steps before are done.

On a CPU a step is done when it returns. On a device a step is only launched then, so a thread waits
until the model's stream has passed it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence

from disagg.connector.handoff.messages import Grown, GrownReport
from disagg.errors import TransferError
from disagg.transport.control.lease import LeaseTable
from disagg.transport.deadline import Event
from disagg.transport.device.staging import Staging

logger = logging.getLogger(__name__)

_LOOK_S = 0.0005


class LeaseGrowth:
    """Passes the growth of leases on to their table. staging: of a cache on a device."""

    def __init__(self, leases: LeaseTable, staging: Staging | None) -> None:
        self._leases, self._staging = leases, staging
        self._waiting: queue.SimpleQueue[tuple[Event, Sequence[Grown]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._reports: queue.SimpleQueue[GrownReport] = queue.SimpleQueue()

    def add(self, grown: Sequence[Grown]) -> None:
        """In the model's thread, before it runs or launches a step: so before the step can
        overwrite blocks that a request has lost.

        With recurrent state, or caches of several precisions, vLLM zeroes and copies new blocks
        even before this. A consumer keeps no part of such a load.
        """
        for one in grown:
            if not one.blocks:
                self._leases.begin_anew(one.lease, one.epoch)
        if self._staging is None:
            self._extend(grown)
            return
        # Without a fence these leases do not grow. They are granted all the same.
        with contextlib.suppress(TransferError):
            self._waiting.put((self._staging.device.model_fence(), grown))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="disagg-growth", daemon=True)
                self._thread.start()

    def take_grown(self) -> list[GrownReport]:
        """How traced leases have grown since the last call."""
        reports = []
        while not self._reports.empty():
            reports.append(self._reports.get_nowait())
        return reports

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)

    def _extend(self, grown: Sequence[Grown]) -> None:
        for one in grown:
            if one.blocks:
                self._leases.extend(one.lease, one.epoch, one.blocks, one.tokens)
                if one.is_traced:
                    self._reports.put(GrownReport(one.lease, one.epoch, one.tokens, time.time_ns()))

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            fence, grown = item
            try:
                while not fence.is_done():
                    time.sleep(_LOOK_S)
            except TransferError as error:
                logger.warning("leases do not grow: %s", error)
                continue
            self._extend(grown)
