"""The scheduler half: passes vLLM's calls to its producer and its consumer part.

Only engines that prefill for others have a producer part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from disagg.connector.handoff import kv_transfer_params as wire
from disagg.connector.handoff.consumer_scheduler import ConsumerScheduler
from disagg.connector.handoff.engine_facts import EngineFacts
from disagg.connector.handoff.growing_leases import BlockIds
from disagg.connector.handoff.messages import StepReport, StepWork
from disagg.connector.handoff.metrics import ConnectorStats
from disagg.connector.handoff.producer_scheduler import ProducerScheduler
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.connector.handoff.stall import StallWatch
from disagg.transport.control.client import Endpoint

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# How often an engine looks that has nothing else to do than to wait for another one's prompts. vLLM
# looks a thousand times a second, and takes the cores from the model of an engine on this host.
_LOOK_S = 0.008


class SchedulerHalf:
    """Scheduler side of `DisaggConnector`."""

    def __init__(
        self,
        engine: EngineFacts,
        settings: ConnectorSettings,
        secret: bytes,
        *,
        produces: bool,
        consumes: bool,
    ) -> None:
        self._secret = secret
        self._stall: StallWatch | None = None
        self.consumer = ConsumerScheduler(engine, settings, consumes=consumes)
        self.producer: ProducerScheduler | None = None
        if produces:
            self.producer = ProducerScheduler(
                engine, secret, settings.lease_s, streams=settings.stream
            )

    def set_workers(self, endpoints: list[Endpoint], layers: list[int]) -> None:
        """endpoints: the workers' control channels, one pipeline stage after the other.
        layers: how many regions each stage's cache has."""
        self.consumer.set_layers(layers)
        if self.producer is not None:
            self.producer.set_workers(endpoints, layers)

    def watch(self, stall: StallWatch) -> None:
        """Take back leases while this engine stands still for want of blocks.

        A producer that loads nothing waits for nobody's blocks; its leases stay.
        """
        if self.producer is not None and self.consumer.consumes:
            self._stall = stall

    def set_blocks(self, blocks: BlockIds) -> None:
        """How to look up a running request's blocks."""
        if self.producer is not None:
            self.producer.set_blocks(blocks)

    def on_new_request(self, request: Request) -> None:
        """Read the params of a request, once."""
        if self._stall is not None:
            self._stall.arrived(request.request_id)
        asked = wire.read(request.kv_transfer_params, self._secret)
        if not isinstance(request.kv_transfer_params, dict):
            # Clients may send any JSON here, and vLLM's scheduler calls .get() on it.
            request.kv_transfer_params = None
        if asked.prefill and self.producer is not None:
            self.producer.on_prefill(request, asked.stream)
        self.consumer.on_new_request(request, asked)

    def num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """As `ConsumerScheduler.num_new_matched_tokens`."""
        return self.consumer.num_new_matched_tokens(request, computed)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """As `ConsumerScheduler.after_alloc`."""
        self.consumer.after_alloc(request, blocks, external)

    def request_finished(
        self, request: Request, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End the request's load; keep its blocks if it is a finished prefill.

        block_ids: per KV cache group, in prompt order. Returns whether vLLM has to keep the blocks,
        and the params of the answer.
        """
        if self._stall is not None:
            self._stall.finished(request.request_id)
        self.consumer.request_finished(request.request_id)
        if self.producer is None:
            return False, None
        return self.producer.request_finished(request, block_ids)

    def reset(self) -> bool:
        """Invalidate everything computed so far, here and for others: the weights may have changed.

        No consumer fetches blocks from before the reset, and this engine computes the prompts
        whose blocks it has not loaded yet.
        """
        if self.producer is not None:
            self.producer.revoke_all()
        self.consumer.reset()
        return True

    def step_work(self, scheduled: Mapping[str, int]) -> StepWork:
        """What the workers have to do in this step. scheduled: tokens that it computes, by request
        id."""
        work = self.consumer.step_work()
        if not scheduled and work == StepWork() and self.consumer.only_waits():
            time.sleep(_LOOK_S)
        if self.producer is not None:
            works = bool(scheduled) or self.consumer.is_loading()
            if self._stall is not None and self._stall.stands_still(works=works):
                self.producer.take_back_oldest()
            self.producer.add_step_work(work, scheduled)
        return work

    def update(self, output: KVConnectorOutput) -> None:
        """Process the workers' reports."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            report = StepReport()
        self.consumer.begun(report.begun)
        self.consumer.moved(report.moved, report.whole)
        self.consumer.update(report.loads, output.finished_recving or ())
        if self.producer is not None:
            self.producer.update(report.leases, output.finished_sending or ())
            self.producer.grown(report.grown)

    def take_stats(self) -> ConnectorStats:
        """Counts since the last call."""
        stats = self.consumer.take_stats()
        if self.producer is not None:
            stats.aggregate(self.producer.take_stats())
        return stats
