"""The scheduler half: decides what is kept, what is loaded, and what is told to peers.

Runs inside vLLM's scheduler, so it never waits and never does I/O. One `PendingLoad` follows a
request's load from arrival to end. Bad params of any kind end in local computation.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from disagg.connector import recurrent_state
from disagg.connector.handoff import block_digests, sharding
from disagg.connector.handoff import kv_transfer_params as wire
from disagg.connector.handoff.messages import (
    Grant,
    HandoffLoad,
    LeaseMessage,
    LoadReport,
    StepReport,
    StepWork,
)
from disagg.connector.handoff.metrics import ConnectorStats
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.connector.kv_cache_layout import NULL_BLOCK
from disagg.identity.weights import Adapters
from disagg.transport.control.client import Endpoint
from disagg.transport.control.ticket import Handoff

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_GONE = -1
_KEPT = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class PendingLoadState(enum.Enum):
    """Where a load stands. QUEUED -> LOADING -> DONE, or QUEUED -> DONE."""

    QUEUED = "queued"
    LOADING = "loading"
    DONE = "done"


@dataclass
class PendingLoad:
    """One request's load on the consumer. tokens: prompt tokens to have when it ended."""

    handoff: Handoff
    tokens: int
    state: PendingLoadState = PendingLoadState.QUEUED
    problem: str | None = None
    renewed: float = 0.0
    called_off: bool = False


class SchedulerHalf:
    """Scheduler side of `DisaggConnector`."""

    def __init__(
        self,
        settings: ConnectorSettings,
        secret: bytes,
        *,
        engine_id: str,
        block_size: int,
        hash_block_size: int,
        windows: bool,
        state_groups: Mapping[int, int],
        world_size: int,
        kv_heads: int,
        splits_blocks: bool,
        hash_blocks: block_digests.Hasher,
        produces: bool,
        consumes: bool,
    ) -> None:
        self._settings, self._secret = settings, secret
        self._engine_id, self._block_size, self._world_size = engine_id, block_size, world_size
        self._hash_block_size = hash_block_size
        self._windows, self._state_groups = windows, state_groups
        self._left_early: set[str] = set()  # producer's requests, see `states`
        self._kv_heads, self._splits_blocks = kv_heads, splits_blocks
        self._hash_blocks, self._adapters = hash_blocks, Adapters()
        self._produces, self._consumes = produces, consumes
        self._endpoints: list[Endpoint] = []
        self._layers: list[int] = []
        self._next_lease = 0
        self._leases: dict[str, str] = {}  # request id -> how it ended, once a rank said so
        self._pulls: dict[str, PendingLoad] = {}
        self._reports: dict[str, list[LoadReport]] = {}
        self._work = StepWork()
        self._stats = ConnectorStats()

    def set_workers(self, endpoints: list[Endpoint], layers: list[int]) -> None:
        """Where the workers listen, those of one pipeline stage after the other, and how many
        regions each stage's cache has."""
        self._endpoints, self._layers = endpoints, layers

    # ---- a request comes -------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Look at its params once; what cannot be used is dropped here, and counted."""
        wanted = wire.read(request.kv_transfer_params, self._secret)
        if not isinstance(request.kv_transfer_params, dict):
            # vLLM's scheduler calls .get() on whatever a client managed to put there.
            request.kv_transfer_params = None
        if wanted.prefill and self._produces and self._state_groups:
            if recurrent_state.leave_last_token(request, self._hash_block_size):
                self._left_early.add(request.request_id)
        if wanted.handoff is None:
            if wanted.problem is not None:
                self._refuse(request, wanted.problem, None)
            return
        if request.abort_immediately:
            # vLLM's message that a request with these params was refused or left before it came
            # here, with a made-up prompt. It is finished next, which lets go of the lease.
            self._pulls[request.request_id] = PendingLoad(wanted.handoff, 0)
            return
        tokens, problem = self._servable(request, wanted.handoff)
        if problem is not None:
            self._refuse(request, problem, wanted.handoff)
            return
        if self._windows:
            # vLLM computes the last token once more, and allocates a window without the token
            # that it then needs: if it is told that all tokens are there, the window is a block
            # short whenever it begins with one.
            tokens = min(tokens, request.num_prompt_tokens - 1)
        pull = PendingLoad(wanted.handoff, tokens, renewed=time.monotonic())
        self._pulls[request.request_id] = pull

    def _servable(self, request: Request, handoff: Handoff) -> tuple[int, str | None]:
        """How many leading tokens the lease can serve, or why it cannot serve any."""
        if not self._consumes:
            return 0, "role"
        if not self._block_sizes_fit(handoff.block_size):
            return 0, "block_size"
        if sum(handoff.layers) != sum(self._layers):
            return 0, "pipeline_parallel_size"
        producers = len(handoff.endpoints) // len(handoff.layers)
        if not sharding.fits(producers, self._world_size, self._kv_heads):
            return 0, "tensor_parallel_size"
        if self._state_groups and producers != self._world_size:
            return 0, "tensor_parallel_size"  # how a state is cut is each model's own
        if not block_digests.hashable(request):
            return 0, "prompt_embeds"
        # Of a prompt that goes on behind the lease's, as much is compared as that one had.
        length = min(handoff.num_tokens, request.num_prompt_tokens)
        ours = self._digests(request, handoff.block_size, length)
        tokens = block_digests.shared_tokens(
            ours, handoff.digests, handoff.num_tokens, handoff.block_size
        )
        tokens = min(tokens, request.num_prompt_tokens)
        if tokens <= 0 or (self._windows and tokens < handoff.num_tokens):
            return 0, "prompt_mismatch"  # a sliding window's blocks serve the whole prompt alone
        if self._state_groups and tokens >= request.num_prompt_tokens:
            return 0, "state"  # it stands behind the token that is to be computed
        return tokens, None

    def _block_sizes_fit(self, theirs: int) -> bool:
        small, large = sorted((theirs, self._block_size))
        if self._windows:
            return small == large
        return small == large or (self._splits_blocks and small > 0 and large % small == 0)

    def _digests(self, request: Request, block_size: int, num_tokens: int) -> bytes:
        hashes: Sequence[bytes] = request.block_hashes
        if block_size != self._hash_block_size:
            hashes = self._hash_blocks(request, block_size)
        adapter = self._adapters.of(request.lora_request)
        return block_digests.digests(request, hashes, block_size, num_tokens, adapter)

    def _refuse(self, request: Request, problem: str, handoff: Handoff | None) -> None:
        logger.warning("request %s computes its prompt here: %s", request.request_id, problem)
        self._stats.count("failures", problem)
        self._stats.count("handoffs", "none|failed")
        if handoff is not None and problem != "prompt_mismatch":
            self._release(handoff)
        if self._settings.strict:
            handoff = handoff or Handoff("", -1, [], [], 0, self._block_size, b"")
            pull = PendingLoad(handoff, request.num_prompt_tokens, problem=problem)
            self._pulls[request.request_id] = pull

    # ---- the consumer's load ---------------------------------------------------------------

    def num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond `computed`. Without side effects; may be asked again."""
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.state is not PendingLoadState.QUEUED:
            return 0, False
        if pull.tokens - computed <= 0 or computed >= request.num_tokens - 1:
            return 0, False  # the last token is computed in any case
        if self._lease_is_loading(pull):
            return None, False  # n > 1: the other one's blocks will be in the prefix cache
        return pull.tokens - computed, True

    def _lease_is_loading(self, pull: PendingLoad) -> bool:
        return any(
            other.state is PendingLoadState.LOADING and other.handoff == pull.handoff
            for other in self._pulls.values()
            if other is not pull
        )

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks are allocated: start the load, or let go of a lease that is not needed."""
        pull = self._pulls.get(request.request_id)
        if pull is None or pull.state is not PendingLoadState.QUEUED:
            return
        if external == 0:
            pull.state = PendingLoadState.DONE
            self._stats.count("handoffs", "none|local_hit")
            self._release(pull.handoff)
            return
        pull.state = PendingLoadState.LOADING
        self._work.loads.append(self._load(request.request_id, pull, blocks, external))

    def _load(
        self, request_id: str, pull: PendingLoad, blocks: KVCacheBlocks, external: int
    ) -> HandoffLoad:
        handoff = pull.handoff
        unit = min(self._block_size, handoff.block_size)
        start, stop = (pull.tokens - external) // unit, -(-pull.tokens // unit)
        per_block = self._block_size // unit
        theirs = -(-handoff.num_tokens // handoff.block_size) * (handoff.block_size // unit)
        spans, ours = [], list[int]()
        for group, ids in enumerate(blocks.get_block_ids()):
            begin, wanted = start, list(ids[start // per_block : -(-stop // per_block)])
            if group in self._state_groups:
                page = recurrent_state.page(ids, pull.tokens, self._state_groups[group])
                begin, wanted = stop - 1, [page]
            while self._windows and wanted and wanted[0] == NULL_BLOCK:
                begin, wanted = begin + 1, wanted[1:]  # one unit is a block here
            if wanted:
                spans.append((group * theirs + begin, group * theirs + stop))
                ours += wanted
        first = start % per_block
        return HandoffLoad(
            request_id,
            handoff.lease,
            handoff.endpoints,
            (handoff.layers, self._layers),
            unit,
            tuple(spans),
            first,
            ours,
            pull.problem,
        )

    # ---- a request ends --------------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a finished prefill; call off what a finished consumer wanted.

        block_ids: of each KV cache group, in prompt order.
        """
        pull = self._pulls.get(request.request_id)
        if pull is not None:
            self._call_off(request.request_id, pull)
        params = request.kv_transfer_params
        left_early = request.request_id in self._left_early
        self._left_early.discard(request.request_id)
        if not self._produces or request.status not in _KEPT:
            return False, None
        if not params or not params.get("do_remote_decode"):
            return False, None
        if self._state_groups and not (left_early or params.get(recurrent_state.KEEPS_TOKEN)):
            return False, None  # nobody could use a state behind the last token
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if tokens < request.num_prompt_tokens or not block_digests.hashable(request):
            return False, None
        if self._state_groups and request.num_computed_tokens > tokens:
            return False, None  # its state has gone on
        return True, self._grant(request, block_ids, tokens)

    def _call_off(self, request_id: str, pull: PendingLoad) -> None:
        if pull.state is PendingLoadState.LOADING:
            # vLLM keeps the blocks until the worker reports; the pull stays until then.
            pull.called_off = True
            self._work.cancels.append(request_id)
            return
        if pull.state is PendingLoadState.QUEUED:
            self._stats.count("handoffs", "none|aborted")
            self._release(pull.handoff)
        del self._pulls[request_id]

    def _grant(
        self, request: Request, block_ids: Sequence[list[int]], tokens: int
    ) -> dict[str, Any]:
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        seconds = self._settings.lease_s
        count = -(-tokens // self._block_size)
        groups = [ids[:count] for ids in block_ids]
        for group, page_tokens in self._state_groups.items():
            page = recurrent_state.page(block_ids[group], tokens, page_tokens)
            groups[group] = [NULL_BLOCK] * (count - 1) + [page]
        kept = groups[0]
        if self._windows:
            kept = [_GONE if id_ == NULL_BLOCK else id_ for ids in groups for id_ in ids]
        self._work.grants.append(Grant(lease, request.request_id, kept, seconds))
        self._leases[request.request_id] = "held"
        self._stats.set_leases_held(len(self._leases))
        handoff = Handoff(
            self._engine_id,
            lease,
            self._endpoints,
            self._layers,
            tokens,
            self._block_size,
            self._digests(request, self._block_size, request.num_prompt_tokens),
        )
        return wire.answer(handoff, self._secret, request.request_id, groups)

    def _release(self, handoff: Handoff) -> None:
        # A producer alone has no connections to other producers; the lease ends by itself.
        if handoff.endpoints and self._consumes:
            self._work.releases.append(LeaseMessage(handoff.lease, handoff.endpoints))

    def reset(self) -> bool:
        """What was computed before counts no more: the weights may be others now.

        Nobody fetches our blocks of before, and what we wanted of others' is computed here.
        """
        self._work.revoked = self._next_lease
        for request_id, pull in self._pulls.items():
            if pull.state is PendingLoadState.LOADING:
                self._work.cancels.append(request_id)
            elif pull.state is PendingLoadState.QUEUED and pull.problem is None:
                pull.state = PendingLoadState.DONE
                self._stats.count("handoffs", "none|aborted")
                self._release(pull.handoff)
        return True

    # ---- each step -------------------------------------------------------------------------

    def step_work(self) -> StepWork:
        """What the workers shall do in this step."""
        self._renew_queued()
        work, self._work = self._work, StepWork()
        return work

    def _renew_queued(self) -> None:
        now, every = time.monotonic(), self._settings.lease_s / 3
        for pull in self._pulls.values():
            if pull.state is PendingLoadState.QUEUED and now - pull.renewed > every:
                pull.renewed = now
                if pull.problem is None:
                    letter = LeaseMessage(pull.handoff.lease, pull.handoff.endpoints)
                    self._work.renewals.append(letter)

    def update(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            for load in report.loads:
                self._reports.setdefault(load.request_id, []).append(load)
            self._leases.update({ended.request_id: ended.outcome for ended in report.leases})
        for request_id in output.finished_recving or ():
            pull = self._pulls.get(request_id)
            if pull is None or pull.state is not PendingLoadState.LOADING:
                continue  # loaded by a connector beside this one
            pull.state = PendingLoadState.DONE
            reports = self._reports.pop(request_id)
            self._count_load(reports, pull)
            if all(report.outcome == "loaded" for report in reports):
                self._was_fetched(pull.handoff)
            if pull.called_off:
                del self._pulls[request_id]
        for request_id in output.finished_sending or ():
            if request_id not in self._leases:
                continue
            self._stats.count("leases", self._leases.pop(request_id))
            self._stats.set_leases_held(len(self._leases))

    def _was_fetched(self, handoff: Handoff) -> None:
        """The lease is over. The other answers to its request (n > 1) find whole blocks in the
        prefix cache, and compute the rest."""
        for other in self._pulls.values():
            if other.problem is not None:
                continue  # strict: it is to be an error, whatever others of this lease are
            if other.state is PendingLoadState.QUEUED and other.handoff == handoff:
                other.state = PendingLoadState.DONE
                self._stats.count("handoffs", "none|local_hit")

    def _count_load(self, reports: list[LoadReport], pull: PendingLoad) -> None:
        worst = next((r for r in reports if r.outcome != "loaded"), reports[0])
        if pull.problem is None:
            self._stats.count("handoffs", f"{worst.transport}|{worst.outcome}")
        if worst.outcome == "loaded":
            self._stats.count("bytes", worst.transport, sum(r.num_bytes for r in reports))
            self._stats.observe_seconds(max(r.seconds for r in reports))
        elif worst.outcome == "failed" and pull.problem is None:
            self._stats.count("failures", worst.reason or "transfer")

    def take_stats(self) -> ConnectorStats:
        """Counts since the last call."""
        stats, self._stats = self._stats, ConnectorStats()
        return stats
