"""The worker half of one rank: takes the KV caches, and passes each step's work to its producer
and its consumer part."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch
from vllm.utils.network_utils import get_ip

from disagg.connector import cache_fingerprint, kv_cache_layout
from disagg.connector.cpu_amx import ask_for_amx
from disagg.connector.handoff.consumer_worker import ConsumerWorker
from disagg.connector.handoff.messages import LeaseReport, StepReport, StepWork, WorkerAddress
from disagg.connector.handoff.producer_worker import ProducerWorker
from disagg.connector.handoff.rank import RankCache, WorkerRank
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.errors import TransferError
from disagg.transport.blocks import BlockCache
from disagg.transport.control.client import Peers
from disagg.transport.device.staging import Staging, open_staging
from disagg.transport.host.huge_pages import collapse
from disagg.transport.registry import Means, make_receivers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class WorkerHalf:
    """Worker side of `DisaggConnector`, for one tensor-parallel rank of one pipeline stage.

    Both parts are made with the caches; only engines that prefill for others have a producer part.
    """

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        settings: ConnectorSettings,
        secret: bytes,
        rank: WorkerRank,
    ) -> None:
        assert config.kv_transfer_config is not None
        self._config, self._kv_cache, self._settings = config, kv_cache, settings
        self._transfer = config.kv_transfer_config
        self._secret, self._rank = secret, rank
        self._report = StepReport()
        self._staging: Staging | None = None
        self._num_layers = 0
        self.producer: ProducerWorker | None = None
        self.consumer: ConsumerWorker | None = None

    # ---- start and end ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches, open the transports, and listen if this engine produces."""
        ask_for_amx(self._config.device_config.device_type)
        settings, rank = self._settings, self._rank
        cache = self._rank_cache(kv_caches)
        self._num_layers = len(cache.layers)
        names, storage = settings.transports, settings.storage(self._secret)
        logger.info(
            "%s rank %d: %d blocks of %d bytes, transports %s, storage %s",
            rank.name,
            rank.number,
            cache.blocks.num_blocks,
            cache.blocks.block_bytes,
            ", ".join(names),
            storage.folder.path,
        )
        host = settings.host or get_ip()
        means = Means(host, self._secret, storage, cache.staging, nixl=settings.nixl)
        consumes = self._transfer.is_kv_consumer
        receivers = make_receivers(names, cache.blocks, means) if consumes else []
        peers = Peers(rank.name, cache.fingerprint, self._secret)
        self.consumer = ConsumerWorker(settings, rank, cache, peers, receivers)
        if self._transfer.is_kv_producer:
            self.producer = ProducerWorker(settings, rank, cache, means)

    def _rank_cache(self, kv_caches: dict[str, torch.Tensor]) -> RankCache:
        blocks = kv_cache_layout.registered_blocks(self._config, self._kv_cache, kv_caches)
        fingerprint = cache_fingerprint.fingerprint(self._config, self._kv_cache)
        layers = cache_fingerprint.layers(self._kv_cache, kv_caches, blocks)
        collapse(blocks.host_memory())
        self._staging = self._open_staging(blocks)
        return RankCache(blocks, layers, fingerprint, self._staging)

    def _open_staging(self, blocks: BlockCache) -> Staging | None:
        """All the device memory that this rank's transfers ever use; None on a CPU."""
        staging = open_staging(
            blocks,
            self._settings.staging_bytes,
            sends=self._transfer.is_kv_producer,
            receives=self._transfer.is_kv_consumer,
        )
        if staging is not None:
            logger.info(
                "%s rank %d: %.1f MiB of device memory for transfers",
                self._rank.name,
                self._rank.number,
                staging.device_bytes / (1 << 20),
            )
        return staging

    def address(self) -> WorkerAddress:
        """Where consumers reach this rank, and how many regions its cache has."""
        endpoint = self.producer.endpoint if self.producer is not None else None
        return WorkerAddress(endpoint, self._num_layers)

    def shutdown(self) -> None:
        """Close every socket and remove every file; running loads fail."""
        if self.producer is not None:
            self.producer.close()
        if self.consumer is not None:
            self.consumer.close()
        if self._staging is not None:
            with contextlib.suppress(TransferError):  # a failed device frees nothing
                self._staging.close()

    # ---- each step -------------------------------------------------------------------------

    def before_step(self, work: StepWork) -> None:
        """The producer's part of a step's work, before the step runs."""
        if self.producer is not None:
            self.producer.start(work)

    def start(self, work: StepWork) -> None:
        """The consumer's part of a step's work, before the step or after its launch."""
        if self.consumer is not None:
            self.consumer.start(work)

    def finished(self) -> tuple[set[str], set[str], set[str], set[int]]:
        """Request ids since the last call: leases ended, loads ended, loads not loaded. Then the
        blocks that are not right, of loads that came in part."""
        leases = self.producer.take_ended() if self.producer is not None else []
        loads = self.consumer.take_ended() if self.consumer is not None else []
        self._report.leases += [LeaseReport(*lease) for lease in leases]
        self._report.loads += loads
        grown = self.producer.take_grown() if self.producer is not None else []
        self._report.grown += grown if self._rank.number == 0 else []
        if self.consumer is not None:
            self._report.begun += self.consumer.take_begun()
            self._report.moved += self.consumer.follower.take_moved()
            self._report.whole += self.consumer.follower.take_whole()
        return (
            {lease.request_id for lease in leases},
            {load.request_id for load in loads},
            {load.request_id for load in loads if load.outcome != "loaded" and not load.invalid},
            {block for load in loads for block in load.invalid},
        )

    def take_report(self) -> StepReport | None:
        """What ended since the last report; None if nothing did."""
        if self._report.is_empty():
            return None
        report, self._report = self._report, StepReport()
        return report
