"""The scheduler's producer part: which prefills keep their blocks under a lease.

Runs inside vLLM's scheduler, so it never waits and never does I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from disagg.connector import recurrent_state
from disagg.connector.handoff import block_digests
from disagg.connector.handoff import kv_transfer_params as wire
from disagg.connector.handoff.engine_facts import EngineFacts
from disagg.connector.handoff.growing_leases import BlockIds, GrowingLeases
from disagg.connector.handoff.messages import Grant, GrownReport, LeaseReport, StepWork
from disagg.connector.handoff.metrics import ConnectorStats
from disagg.connector.kv_cache_layout import NULL_BLOCK
from disagg.transport.control.client import Endpoint
from disagg.transport.control.ticket import Handoff

if TYPE_CHECKING:
    from vllm.v1.request import Request

_FREED = -1
_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class ProducerScheduler:
    """Grants leases, and counts how they end."""

    def __init__(
        self, engine: EngineFacts, secret: bytes, lease_s: float, *, streams: bool = True
    ) -> None:
        self._engine, self._secret, self._lease_s = engine, secret, lease_s
        self._step_tokens = engine.step_tokens if streams else None
        self._growing = GrowingLeases(engine)
        self._blocks: BlockIds | None = None
        self._endpoints: list[Endpoint] = []
        self._layers: list[int] = []
        self._without_last_token: set[str] = set()  # request ids, see `recurrent_state`
        self._next_lease = 0
        self._revoked = 0
        self._taken_back: list[int] = []
        self._grants: list[Grant] = []
        self._leases: dict[str, str] = {}  # request id -> outcome, "held" until a rank reports one
        self._numbers: dict[str, int] = {}  # request id -> lease, oldest first, unless taken back
        self._stats = ConnectorStats()

    def set_workers(self, endpoints: list[Endpoint], layers: list[int]) -> None:
        """As `SchedulerHalf.set_workers`."""
        self._endpoints, self._layers = endpoints, layers

    def set_blocks(self, blocks: BlockIds) -> None:
        """How to look up a running request's blocks."""
        self._blocks = blocks

    def on_prefill(self, request: Request, stream: bytes = b"") -> None:
        """A prefill leg arrives: with recurrent state, leave out the prompt's last token.

        stream: of the consumer that follows this prefill.
        """
        hands_off = True
        if self._engine.state_groups:
            hands_off = recurrent_state.leave_last_token(request, self._engine.hash_block_size)
            if hands_off:
                self._without_last_token.add(request.request_id)
        grows = hands_off and self._step_tokens is not None and self._keeps_blocks(request)
        if stream and grows:
            self._growing.asked(request, stream)
        elif stream:
            self._growing.will_not_grow(stream)

    def _keeps_blocks(self, request: Request) -> bool:
        """Whether the blocks that are final while the prompt is computed stay until it is granted.
        A longer answer moves a sliding window past some of them."""
        windows = [group for group, tokens in self._engine.late_groups.items() if tokens]
        return all(request.max_tokens <= self._engine.tokens_of(group) for group in windows)

    def request_finished(
        self, request: Request, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a finished prefill. block_ids: per KV cache group, in prompt order."""
        lease = self._growing.ends(request.request_id)
        keeps, params = self._finished(request, block_ids, lease)
        if lease is not None and not keeps:
            self._growing.stop(lease)
        return keeps, params

    def _finished(
        self, request: Request, block_ids: Sequence[list[int]], lease: int | None
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        shortened = request.request_id in self._without_last_token
        self._without_last_token.discard(request.request_id)
        if request.status not in _COMPLETE or not params or not params.get("do_remote_decode"):
            return False, None
        has_states = bool(self._engine.state_groups)
        if has_states and not (shortened or params.get(recurrent_state.KEEPS_TOKEN)):
            return False, None  # no consumer can use a state behind the last token
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if tokens < request.num_prompt_tokens or not block_digests.hashable(request):
            return False, None
        if has_states and request.num_computed_tokens > tokens:
            return False, None  # the state has advanced past the prompt
        number = self._number() if lease is None else lease
        return True, self._grant(request, block_ids, tokens, number)

    def _number(self) -> int:
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        return lease

    def _grant(
        self, request: Request, block_ids: Sequence[list[int]], tokens: int, lease: int
    ) -> dict[str, Any]:
        engine = self._engine
        count = -(-tokens // engine.block_size)
        groups = [
            ids[: -(-tokens // engine.tokens_of(group))] for group, ids in enumerate(block_ids)
        ]
        for group, page_tokens in engine.state_groups.items():
            page = recurrent_state.page(block_ids[group], tokens, page_tokens)
            groups[group] = [NULL_BLOCK] * (count - 1) + [page]
        leased = groups[0]
        if engine.windows:
            leased = [_FREED if id_ == NULL_BLOCK else id_ for ids in groups for id_ in ids]
        self._grants.append(Grant(lease, request.request_id, leased, self._lease_s))
        self._leases[request.request_id] = "held"
        self._numbers[request.request_id] = lease
        self._stats.set_leases_held(len(self._leases))
        handoff = Handoff(
            engine.engine_id,
            lease,
            self._endpoints,
            self._layers,
            tokens,
            engine.block_size,
            engine.digests.of(request, engine.block_size, request.num_prompt_tokens),
        )
        return wire.answer(
            handoff, self._secret, request.request_id, groups, step_tokens=self._step_tokens
        )

    def revoke_all(self) -> None:
        """End every lease so far: the weights may have changed."""
        self._revoked = self._next_lease
        self._growing.forget()

    def take_back_oldest(self) -> None:
        """End the lease that was granted first, as this engine needs its blocks itself."""
        oldest = next(iter(self._numbers), None)
        if oldest is not None:
            self._taken_back.append(self._numbers.pop(oldest))

    def add_step_work(self, work: StepWork, scheduled: Collection[str] = ()) -> None:
        """Add the grants of this step, what it revokes or takes back, and how leases grow.

        scheduled: the requests that it computes.
        """
        if self._blocks is not None:
            self._growing.step(scheduled, self._blocks, self._number)
        self._growing.add_work(work)
        work.grants, self._grants = self._grants, []
        work.revoked, self._revoked = self._revoked, 0
        work.taken_back, self._taken_back = self._taken_back, []

    def update(self, ended: Iterable[LeaseReport], sent: Iterable[str]) -> None:
        """ended: reports of single ranks. sent: request ids whose lease ended on all ranks."""
        self._leases.update({report.request_id: report.outcome for report in ended})
        for request_id in sent:
            if request_id in self._leases:
                self._stats.count("leases", self._leases.pop(request_id))
                self._numbers.pop(request_id, None)
                self._stats.set_leases_held(len(self._leases))

    def grown(self, reports: Iterable[GrownReport]) -> None:
        """When traced leases grew."""
        self._growing.reported(reports)

    def take_stats(self) -> ConnectorStats:
        """Counts since the last call."""
        stats, self._stats = self._stats, ConnectorStats()
        return stats
