"""The worker half of one rank: serves leases, runs loads, reports what ended.

vLLM calls in from its model loop; nothing here may block it. Loads and letters run in threads
of ours, of each producer's by themselves, each bounded by a deadline; their copies let go of the
GIL.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import secrets as random
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.utils.network_utils import get_ip

from disagg.connector import kv_cache_layout, recurrent_state
from disagg.connector.cpu_amx import ask_for_amx
from disagg.connector.handoff import sharding
from disagg.connector.handoff.messages import (
    Grant,
    HandoffLoad,
    LeaseMessage,
    LeaseReport,
    LoadReport,
    StepReport,
    StepWork,
    WorkerAddress,
)
from disagg.connector.handoff.per_peer_threads import PerPeerThreads
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.errors import PeerLost, PeerRefused, TransferError
from disagg.transport import fetch as handoff
from disagg.transport.base import FetchJob, Receiver, Sender
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.control.client import Endpoint, Peers
from disagg.transport.control.lease import LeaseTable
from disagg.transport.control.server import ControlServer
from disagg.transport.deadline import Deadline, Event
from disagg.transport.device.staging import Staging, open_staging
from disagg.transport.host.huge_pages import collapse
from disagg.transport.protocol import Part, Welcome
from disagg.transport.registry import Means, make_receivers, make_senders

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_LETTER_S, _LETTERS_AT_ONCE = 5.0, 2
# A consumer gives up at its own deadline; past that and some slack its silence is a death.
_USE_SLACK_S = 5.0


class WorkerHalf:
    """Worker side of `DisaggConnector`, for one tensor-parallel rank of one pipeline stage."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        settings: ConnectorSettings,
        secret: bytes,
        *,
        name: str,
        rank: int,
        world_size: int,
        stage: int,
    ) -> None:
        assert config.kv_transfer_config is not None
        self._config, self._kv_cache, self._settings = config, kv_cache, settings
        self._transfer = config.kv_transfer_config
        self._secret, self._name = secret, name
        self._rank, self._world_size, self._stage = rank, world_size, stage
        self._ranks = world_size * config.parallel_config.pipeline_parallel_size
        self._kv_heads = kv_cache_layout.kv_heads(config)
        self._use_limit_s = settings.load_deadline_s + _USE_SLACK_S
        self._leases = LeaseTable(self._use_limit_s)
        self._host = settings.host or get_ip()
        self._ended: queue.SimpleQueue[LoadReport] = queue.SimpleQueue()
        self._cancelled: dict[str, threading.Event] = {}
        self._report = StepReport()
        self._senders: list[Sender] = []
        self._receivers: list[Receiver] = []
        self._server: ControlServer | None = None
        self._endpoint: Endpoint | None = None
        self._peers: Peers | None = None
        self._cache: BlockCache | None = None
        self._layers: tuple[str, ...] = ()
        self._staging: Staging | None = None
        self._loads = PerPeerThreads("disagg-load", settings.load_threads)
        self._letters = PerPeerThreads("disagg-letter", _LETTERS_AT_ONCE)

    # ---- start and end ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches, start to listen."""
        ask_for_amx(self._config.device_config.device_type)
        pages = recurrent_state.pages_of(self._config, self._kv_cache)
        cache = kv_cache_layout.block_cache(kv_caches, pages)
        if not pages:
            kv_cache_layout.check_block_size(self._kv_cache, cache)
        fingerprint = kv_cache_layout.fingerprint(self._config, self._kv_cache)
        self._layers = kv_cache_layout.layers(self._kv_cache, kv_caches, cache)
        collapse(cache.host_memory())
        names, storage = self._settings.transports, self._settings.storage()
        self._staging = self._open_staging(cache)
        means = Means(self._host, self._secret, storage, self._staging, self._leases.board)
        logger.info(
            "%s rank %d: %d blocks of %d bytes, transports %s, storage %s",
            self._name,
            self._number,
            cache.num_blocks,
            cache.block_bytes,
            ", ".join(names),
            storage.folder,
        )
        self._cache = cache
        if self._transfer.is_kv_consumer:
            self._receivers = make_receivers(names, cache, means)
            self._peers = Peers(self._name, fingerprint, self._secret)
        if self._transfer.is_kv_producer:
            self._senders = make_senders(names, cache, means)
            self._server = self._listen(cache, fingerprint)

    def _open_staging(self, cache: BlockCache) -> Staging | None:
        """All the device memory that transfers of this rank ever have; None on a CPU."""
        staging = open_staging(
            cache,
            self._settings.staging_bytes,
            sends=self._transfer.is_kv_producer,
            receives=self._transfer.is_kv_consumer,
        )
        if staging is not None:
            logger.info(
                "%s rank %d: %.1f MiB of device memory for transfers",
                self._name,
                self._number,
                staging.device_bytes / (1 << 20),
            )
        return staging

    def _listen(self, cache: BlockCache, fingerprint: dict[str, str]) -> ControlServer:
        offers = {sender.name: sender.offer() for sender in self._senders}
        welcome = Welcome(self._name, random.token_hex(8), offers, self._layers)
        server = ControlServer(
            host=self._host,
            port=self._settings.port and self._settings.port + self._number,
            secret=self._secret,
            hello=welcome,
            fingerprint=fingerprint,
            cache=cache,
            leases=self._leases,
            senders=self._senders,
            use_limit_s=self._use_limit_s,
        )
        self._endpoint = Endpoint(server.host, server.port, welcome.generation)
        logger.info("%s rank %d: control channel on %s", self._name, self._number, self._endpoint)
        return server

    @property
    def _number(self) -> int:
        """This rank among all of its engine's, one pipeline stage after the other."""
        return self._stage * self._world_size + self._rank

    def address(self) -> WorkerAddress:
        """Where consumers reach this rank, and what the scheduler half must know of its cache."""
        return WorkerAddress(self._endpoint, len(self._layers))

    def shutdown(self) -> None:
        """Close every socket and remove every file; running loads end by their closed socket."""
        for event in self._cancelled.values():
            event.set()
        if self._server is not None:
            self._server.close()
        if self._peers is not None:
            self._peers.close()
        self._loads.close()
        self._letters.close()
        for receiver in self._receivers:
            receiver.close()
        for sender in self._senders:
            sender.close()
        if self._staging is not None:
            with contextlib.suppress(TransferError):  # a device that failed takes nothing back
                self._staging.close()

    # ---- each step -------------------------------------------------------------------------

    def start(self, work: StepWork) -> None:
        """Begin what the scheduler half decided in this step."""
        for grant in work.grants:
            self._grant(grant)
        if work.revoked:
            self._leases.revoke(work.revoked)
        if work.loads:
            self._start_loads(work.loads)
        for request_id in work.cancels:
            if request_id in self._cancelled:
                self._cancelled[request_id].set()
        for letter in work.releases:
            post = functools.partial(self._post, letter, release=True)
            self._letters.submit(_peer(letter), post)
        for letter in work.renewals:
            post = functools.partial(self._post, letter, release=False)
            self._letters.submit(_peer(letter), post)

    def _start_loads(self, loads: Sequence[HandoffLoad]) -> None:
        after, deadline = self._fence(), Deadline.after(self._settings.load_deadline_s)
        for load in loads:
            self._cancelled[load.request_id] = threading.Event()
            self._loads.submit(_peer(load), functools.partial(self._load, load, deadline, after))

    def _fence(self) -> Event | TransferError | None:
        """Behind all that the model's stream has: steps under way may still write to the blocks
        that loads were given. None on a CPU, where steps are over when they return."""
        try:
            return None if self._staging is None else self._staging.device.model_fence()
        except TransferError as error:
            return error  # for the loads to report; the step has nothing to do with it

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """Request ids (sent, received or given up, failed) since the last call."""
        ended = self._leases.take_ended()
        self._report.leases += [LeaseReport(*lease) for lease in ended]
        received, failed = set(), set()
        while not self._ended.empty():
            report = self._ended.get_nowait()
            if self._cancelled.pop(report.request_id).is_set() and report.outcome == "loaded":
                report = replace(report, outcome="aborted")  # it came, and is not wanted any more
            self._report.loads.append(report)
            received.add(report.request_id)
            if report.outcome != "loaded":
                failed.add(report.request_id)
        return {lease.request_id for lease in ended}, received, failed

    def take_report(self) -> StepReport | None:
        """What the scheduler half is to hear of, if anything."""
        if not self._report.loads and not self._report.leases:
            return None
        report, self._report = self._report, StepReport()
        return report

    def _grant(self, grant: Grant) -> None:
        self._leases.grant(grant.lease, grant.request_id, grant.block_ids, grant.seconds)

    # ---- in threads of ours ----------------------------------------------------------------

    def _load(
        self, load: HandoffLoad, deadline: Deadline, after: Event | TransferError | None
    ) -> None:
        """Always reports exactly once: vLLM holds the request's blocks until then."""
        with contextlib.ExitStack() as fetched:  # what is left to say is said after the report
            self._load_and_report(load, deadline, after, fetched)

    def _load_and_report(
        self,
        load: HandoffLoad,
        deadline: Deadline,
        after: Event | TransferError | None,
        fetched: contextlib.ExitStack,
    ) -> None:
        outcome, reason, moved = "failed", load.problem, None
        try:
            if self._cancelled[load.request_id].is_set():
                outcome = "aborted"
                self._release(load.endpoints, load.lease)
            elif load.problem is None:
                moved = self._fetch(load, deadline, after, fetched)
                outcome = "loaded"
        except TransferError as error:
            reason = error.reason
            logger.warning(
                "request %s computes its prompt here, its KV did not come (%s): %s",
                load.request_id,
                reason,
                error,
            )
        except Exception:
            reason = "internal"
            logger.exception("load of request %s failed unexpectedly", load.request_id)
        finally:
            self._ended.put(
                LoadReport(
                    load.request_id,
                    outcome,
                    moved.transport if moved else "none",
                    moved.num_bytes if moved else 0,
                    moved.seconds if moved else 0.0,
                    reason,
                )
            )

    def _fetch(
        self,
        load: HandoffLoad,
        deadline: Deadline,
        after: Event | TransferError | None,
        fetched: contextlib.ExitStack,
    ) -> handoff.Moved:
        """Fetch this rank's heads from every producer rank that holds some of them."""
        assert self._peers is not None
        problem = after if isinstance(after, TransferError) else self._cannot(load)
        if problem is not None:
            self._release(load.endpoints, load.lease)
            raise problem
        assert not isinstance(after, TransferError)
        wanted = list(self._wanted(load))
        moved: list[handoff.Moved] = []
        try:
            for source, blocks in wanted:
                job = FetchJob(blocks, deadline, after)
                fetch = handoff.fetched(self._peers, source, job, self._receivers)
                moved.append(fetched.enter_context(fetch))
        except TransferError:
            # The other ranks' blocks are of no more use; the producer need not wait to learn it.
            self._release([source.endpoint for source, _ in wanted[len(moved) + 1 :]], load.lease)
            raise
        for one in moved:
            for name in one.failed_over:
                logger.warning("request %s: transport %s failed over", load.request_id, name)
        self._release(self._unread(load), load.lease)
        return handoff.total(moved)

    def _cannot(self, load: HandoffLoad) -> TransferError | None:
        """A draft may have other heads than its model, which are then not sliced."""
        if self._slices(_producers(load)) and self._cache and self._cache.heads is None:
            return PeerRefused("layers differ in their heads", "tensor_parallel_size")
        return None

    def _wanted(self, load: HandoffLoad) -> Iterator[tuple[handoff.Wanted, Selection]]:
        """What to fetch from which rank: each of our layers and heads once."""
        producers, slices = _producers(load), self._slices(_producers(load))
        count = sum(stop - start for start, stop in load.spans)
        readers = sharding.readers(producers, self._world_size, self._kv_heads)
        sources = sharding.sources(producers, self._world_size, self._rank, self._kv_heads)
        for stage in sharding.stages(*load.layers, self._stage):
            stages = sharding.readers_of_stage(*load.layers, stage.number)
            layers = self._layers[slice(*stage.ours)]
            for source in sources:
                # Ranks of one size hold the same heads, so blocks go over whole.
                theirs, ours = (source.theirs, source.ours) if slices else (None, None)
                part = Part(load.unit, load.spans, theirs, stage.theirs)
                yield (
                    handoff.Wanted(
                        load.endpoints[stage.number * producers + source.rank],
                        load.lease,
                        part,
                        layers,
                        readers[source.rank] * stages,
                    ),
                    Selection(load.block_ids, load.unit, load.first, count, ours, stage.ours),
                )

    def _slices(self, producers: int) -> bool:
        size = self._world_size
        return min(producers, self._kv_heads) != min(size, self._kv_heads)

    def _unread(self, load: HandoffLoad) -> list[Endpoint]:
        """Producer ranks that nobody reads (replicas), and whose lease this rank is to end."""
        readers = sharding.readers(_producers(load), self._world_size, self._kv_heads)
        return [
            endpoint
            for number, endpoint in enumerate(load.endpoints)
            if readers[number % len(readers)] == 0 and number % self._ranks == self._number
        ]

    def _post(self, letter: LeaseMessage, *, release: bool) -> None:
        """Tell the producer's ranks; between them, our ranks tell each of them once."""
        assert self._peers is not None
        endpoints = letter.endpoints[self._number :: self._ranks]
        if release:
            self._release(endpoints, letter.lease)
            return
        try:
            for endpoint in endpoints:
                handoff.renew(self._peers, endpoint, [letter.lease], Deadline.after(_LETTER_S))
        except TransferError as error:
            logger.info("lease %d is not renewed: %s", letter.lease, error)

    def _release(self, endpoints: Sequence[Endpoint], lease: int) -> None:
        """Never raises: no load depends on it, and leases end by themselves too."""
        assert self._peers is not None
        try:
            handoff.release_all(self._peers, endpoints, lease, Deadline.after(_LETTER_S))
        except PeerLost as error:
            logger.info("lease %d ends by itself: %s", lease, error)
        except TransferError as error:
            logger.warning("lease %d not released: %s", lease, error)


def _peer(of: HandoffLoad | LeaseMessage) -> Hashable:
    """Which producer it is about."""
    return tuple(of.endpoints[:1])


def _producers(load: HandoffLoad) -> int:
    """The producer's tensor parallel size."""
    return len(load.endpoints) // len(load.layers[0])
