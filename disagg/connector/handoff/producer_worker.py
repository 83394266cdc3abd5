"""The producer part of one worker rank: keeps leases, and serves them on its control channel."""

from __future__ import annotations

import logging
import secrets as random
from dataclasses import replace

from disagg.connector.handoff.lease_growth import LeaseGrowth
from disagg.connector.handoff.messages import GrownReport, StepWork
from disagg.connector.handoff.rank import RankCache, WorkerRank
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.errors import ConfigError
from disagg.transport.control.client import Endpoint
from disagg.transport.control.lease import EndedLease, LeaseTable
from disagg.transport.control.server import ControlServer
from disagg.transport.protocol import Welcome
from disagg.transport.registry import Means, make_senders

logger = logging.getLogger(__name__)

# A consumer gives up at its own deadline; if it is silent for longer than that plus this slack, it
# counts as dead.
_USE_SLACK_S = 5.0
_LAST_PORT = 65535


class ProducerWorker:
    """Listens from the start. Its control server and its senders run in threads of their own."""

    def __init__(
        self, settings: ConnectorSettings, rank: WorkerRank, cache: RankCache, means: Means
    ) -> None:
        use_limit_s = settings.load_deadline_s + _USE_SLACK_S
        self._leases = LeaseTable(use_limit_s, settings.lease_limit_s)
        means = replace(means, board=self._leases.board)
        self._senders = make_senders(settings.transports, cache.blocks, means)
        offers = {sender.name: sender.offer() for sender in self._senders}
        welcome = Welcome(rank.name, random.token_hex(8), offers, cache.layers)
        try:
            self._server = ControlServer(
                host=means.host,
                port=settings.port and _port(settings.port, rank),
                secret=means.secret,
                hello=welcome,
                fingerprint=cache.fingerprint,
                cache=cache.blocks,
                leases=self._leases,
                senders=self._senders,
                use_limit_s=use_limit_s,
            )
        except BaseException:
            self._close_senders()
            raise
        self._growth = LeaseGrowth(self._leases, cache.staging)
        self.endpoint = Endpoint(self._server.host, self._server.port, welcome.generation)
        logger.info("%s rank %d: control channel on %s", rank.name, rank.number, self.endpoint)

    def start(self, work: StepWork) -> None:
        """Keep the leases that were granted, and let others grow; end those that were revoked,
        taken back or stopped."""
        for stream in work.queued:
            self._leases.queue(stream)
        for new in work.growing:
            self._leases.grow(new.lease, new.request_id, new.stream, new.prompt, new.blocks)
        if work.grown:
            self._growth.add(work.grown)
        for stream in work.unwanted:
            self._leases.leave(stream)
        for lease in work.stopped:
            self._leases.stop(lease)
        for grant in work.grants:
            self._leases.grant(grant.lease, grant.request_id, grant.block_ids, grant.seconds)
        if work.revoked:
            self._leases.revoke(work.revoked)
        if work.taken_back:
            self._leases.take_back(work.taken_back)

    def take_ended(self) -> list[EndedLease]:
        """Leases that ended since the last call; vLLM may free their blocks."""
        return self._leases.take_ended()

    def take_grown(self) -> list[GrownReport]:
        """How traced leases have grown since the last call."""
        return self._growth.take_grown()

    def close(self) -> None:
        """Close every socket, and remove what the senders staged."""
        self._growth.close()
        self._server.close()
        self._close_senders()

    def _close_senders(self) -> None:
        for sender in self._senders:
            sender.close()


def _port(first: int, rank: WorkerRank) -> int:
    port = first + rank.port_offset
    if port > _LAST_PORT:
        raise ConfigError(
            f"port: {first} — rank {rank.number} of data parallel rank {rank.data_parallel_rank} "
            f"would listen on {port}; set a lower port, or 0 for any free one"
        )
    return port
