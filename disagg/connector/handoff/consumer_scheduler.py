"""The scheduler's consumer part: which requests load their prompt's blocks, and how far.

Runs inside vLLM's scheduler, so it never waits and never does I/O. One `PendingLoad` follows a
request's load from arrival to end. Unusable params of any kind end in local computation; in strict
mode, in an error.

A pure producer has this part too: there it refuses every handoff (reason `role`), and sends
nothing to other producers, as its workers have no connections to them.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg.connector import recurrent_state
from disagg.connector.handoff import block_digests, sharding
from disagg.connector.handoff.engine_facts import EngineFacts
from disagg.connector.handoff.kv_transfer_params import Requested
from disagg.connector.handoff.messages import (
    BegunReport,
    HandoffLoad,
    LeaseMessage,
    LoadReport,
    SpanGrowth,
    StepWork,
    Watch,
)
from disagg.connector.handoff.metrics import ConnectorStats
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.connector.handoff.spans import HandoffSpan, open_tracer
from disagg.connector.handoff.stall import PATIENCE_S
from disagg.connector.kv_cache_layout import NULL_BLOCK
from disagg.safe_logging import foreign
from disagg.transport.control.ticket import Handoff, Invitation

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class PendingLoadState(enum.Enum):
    """Where a load stands. QUEUED -> LOADING -> DONE, QUEUED -> SHARED -> DONE, or QUEUED -> DONE.

    SHARED: another request (n > 1) has fetched the lease; this one looks into the prefix cache.
    """

    QUEUED = "queued"
    LOADING = "loading"
    SHARED = "shared"
    DONE = "done"


_UNDER_WAY = (PendingLoadState.QUEUED, PendingLoadState.LOADING)


@dataclass
class PendingLoad:
    """One request's load. tokens: prompt tokens that are present when it has ended. problem: why it
    is refused (strict mode). renewed: when the lease was last renewed, monotonic seconds. cached:
    prompt tokens that vLLM found in its prefix cache. span: of the load, if it is traced.
    has_begun: prefill computes the prompt, or has; until then no blocks are allocated. grows: it
    follows a prompt that is still computed. moved: when it last got on, monotonic seconds."""

    handoff: Handoff
    tokens: int
    state: PendingLoadState = PendingLoadState.QUEUED
    problem: str | None = None
    renewed: float = 0.0
    cached: int = 0
    cancelled: bool = False
    span: HandoffSpan | None = None
    has_begun: bool = True
    grows: bool = False
    moved: float = 0.0


class ConsumerScheduler:
    """Checks tickets, starts loads, releases and renews the leases of other engines. clock:
    monotonic seconds."""

    def __init__(
        self,
        engine: EngineFacts,
        settings: ConnectorSettings,
        *,
        consumes: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._settings, self.consumes = engine, settings, consumes
        self._clock, self._tracer = clock, open_tracer()
        self._layers: list[int] = []
        self._loads: dict[str, PendingLoad] = {}
        self._reports: dict[str, list[LoadReport]] = {}
        self._work = StepWork()
        self._stats = ConnectorStats()

    def set_layers(self, layers: list[int]) -> None:
        """How many regions each pipeline stage's cache has."""
        self._layers = layers

    # ---- a request arrives -----------------------------------------------------------------

    def on_new_request(self, request: Request, asked: Requested) -> None:
        """Check a request's params once; unusable ones are counted and dropped."""
        handoff = asked.handoff
        if asked.invitation is not None:
            if not block_digests.hashable(request):
                self._refuse(request, "prompt_embeds", None)
                return
            handoff = self._followed(request, asked.invitation, asked.stream)
        if handoff is None:
            if asked.problem is not None:
                self._refuse(request, asked.problem, None)
            return
        if request.abort_immediately:
            # vLLM reports so that a request with these params was refused, or aborted before it
            # was scheduled; its prompt is made up. It is finished next, which releases the lease.
            self._loads[request.request_id] = PendingLoad(handoff, 0)
            return
        tokens, problem = self._servable(request, handoff)
        if problem is not None:
            self._refuse(request, problem, handoff)
            return
        if self._engine.windows:
            # vLLM computes the last token again. If all tokens counted as loaded, it would allocate
            # the window without that token: one block too few where the window begins with one.
            tokens = min(tokens, request.num_prompt_tokens - 1)
        if self._engine.speculates:
            # Where one token is left, vLLM adds empty guesses to it, and samples the next token by
            # its rejection sampler: not as an engine does that computed the whole prompt.
            tokens = min(tokens, request.num_prompt_tokens - 2)
        load = PendingLoad(handoff, tokens, renewed=self._clock())
        self._loads[request.request_id] = load
        if handoff.stream:
            load.has_begun = False
            watch = Watch(
                request.request_id, handoff.endpoints[0], handoff.stream, handoff.prompt()
            )
            self._work.watches.append(watch)

    def begun(self, reports: Iterable[BegunReport]) -> None:
        """Streams have begun, or never will."""
        for report in reports:
            load = self._loads.get(report.request_id)
            if load is None or load.state is not PendingLoadState.QUEUED or load.has_begun:
                continue
            load.has_begun = True
            if report.problem is None:
                continue
            logger.warning(
                "request %s computes its prompt here, prefill has not begun with it: %s",
                foreign(report.request_id),
                report.problem,
            )
            self._stats.count("failures", report.problem)
            self._stats.count("handoffs", "none|failed")
            if report.problem != "prompt_mismatch":  # then the lease is another request's
                self._release(load.handoff)
            if self._settings.strict:
                load.problem, load.handoff = report.problem, _nobodys(load.handoff.block_size)
            else:
                load.state = PendingLoadState.DONE

    def moved(self, request_ids: Iterable[str], whole: Iterable[str] = ()) -> None:
        """These requests' loads got on. whole: the prompts of these are computed."""
        for request_id in request_ids:
            load = self._loads.get(request_id)
            if load is not None:
                load.moved = self._clock()
        for request_id in whole:
            load = self._loads.get(request_id)
            if load is not None:
                load.grows = False

    def _followed(self, request: Request, invitation: Invitation, stream: bytes) -> Handoff:
        """The lease of this request's own prompt, as its producer will grant it."""
        tokens = request.num_prompt_tokens - bool(self._engine.state_groups)
        digests = b""
        if tokens > 0:
            digests = self._engine.digests.of(request, invitation.block_size, tokens)
        return Handoff(
            invitation.engine,
            -1,
            invitation.endpoints,
            invitation.layers,
            max(tokens, 1),
            invitation.block_size,
            digests,
            stream,
        )

    def _servable(self, request: Request, handoff: Handoff) -> tuple[int, str | None]:
        """How many leading tokens the lease can serve, or the reason why it can serve none."""
        engine = self._engine
        if not self.consumes:
            return 0, "role"
        if not self._block_sizes_fit(handoff.block_size):
            return 0, "block_size"
        if sum(handoff.layers) != sum(self._layers):
            return 0, "pipeline_parallel_size"
        producers = len(handoff.endpoints) // len(handoff.layers)
        if not sharding.fits(producers, engine.world_size, engine.kv_heads):
            return 0, "tensor_parallel_size"
        if engine.whole_blocks and producers != engine.world_size:
            return 0, "tensor_parallel_size"  # such blocks cannot be sliced for other ranks
        if not block_digests.hashable(request):
            return 0, "prompt_embeds"
        # If this prompt is longer than the lease's, only the lease's length is compared.
        length = min(handoff.num_tokens, request.num_prompt_tokens)
        ours = engine.digests.of(request, handoff.block_size, length)
        tokens = block_digests.shared_tokens(
            ours, handoff.digests, handoff.num_tokens, handoff.block_size
        )
        tokens = min(tokens, request.num_prompt_tokens)
        if tokens <= 0 or (engine.windows and tokens < handoff.num_tokens):
            return 0, "prompt_mismatch"  # a sliding window's blocks serve only the whole prompt
        if engine.state_groups and tokens >= request.num_prompt_tokens:
            return 0, "state"  # the state already includes the token that has to be computed
        return tokens, None

    def _block_sizes_fit(self, theirs: int) -> bool:
        small, large = sorted((theirs, self._engine.block_size))
        if self._engine.windows:
            return small == large
        return small == large or (self._engine.splits_blocks and small > 0 and large % small == 0)

    def _refuse(self, request: Request, problem: str, handoff: Handoff | None) -> None:
        logger.warning(
            "request %s computes its prompt here: %s", foreign(request.request_id), problem
        )
        self._stats.count("failures", problem)
        self._stats.count("handoffs", "none|failed")
        if handoff is not None and problem != "prompt_mismatch":
            self._release(handoff)
        if self._settings.strict:
            handoff = handoff or _nobodys(self._engine.block_size)
            load = PendingLoad(handoff, request.num_prompt_tokens, problem=problem)
            self._loads[request.request_id] = load

    # ---- its load --------------------------------------------------------------------------

    def num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond `computed`. Without side effects; vLLM may ask again."""
        load = self._loads.get(request.request_id)
        if load is None:
            return 0, False
        load.cached = computed
        if load.state is not PendingLoadState.QUEUED:
            return 0, False
        if load.tokens - computed <= 0 or computed >= request.num_tokens - 1:
            return 0, False  # the last token is computed in any case
        if any(computed % size for size in self._engine.group_block_sizes):
            return 0, False  # a load writes whole blocks, and part of one is shared
        if not load.has_begun:
            return None, False  # no blocks before prefill has begun with the prompt
        if self._lease_is_loading(load):
            return None, False  # n > 1: the prefix cache will hold the other request's blocks
        return load.tokens - computed, True

    def _lease_is_loading(self, load: PendingLoad) -> bool:
        return any(
            other.state is PendingLoadState.LOADING and other.handoff == load.handoff
            for other in self._loads.values()
            if other is not load
        )

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM allocated the blocks: start the load, or release the lease if it is not needed."""
        load = self._loads.get(request.request_id)
        if load is None:
            return
        if load.state is PendingLoadState.SHARED:
            self._not_needed(request, load)
        if load.state is not PendingLoadState.QUEUED:
            return
        if external == 0:
            self._not_needed(request, load)
            self._release(load.handoff)
            return
        load.state, load.moved = PendingLoadState.LOADING, self._clock()
        load.grows = bool(load.handoff.stream)
        if self._tracer is not None and request.trace_headers:
            load.span = HandoffSpan(self._tracer, request.trace_headers)
        self._work.loads.append(self._handoff_load(request.request_id, load, blocks, external))

    def _not_needed(self, request: Request, load: PendingLoad) -> None:
        """The prefix cache has the lease's whole blocks, or the request computes them."""
        load.state = PendingLoadState.DONE
        tokens = min(load.tokens, request.num_tokens - 1)
        whole = tokens - tokens % self._engine.block_size
        found = "local_hit" if 0 < whole <= load.cached else "computed"
        self._stats.count("handoffs", f"none|{found}")

    def _handoff_load(
        self, request_id: str, load: PendingLoad, blocks: KVCacheBlocks, external: int
    ) -> HandoffLoad:
        handoff, engine = load.handoff, self._engine
        unit = min(engine.block_size, handoff.block_size)
        per_block = engine.block_size // unit
        spans, growth, ours, before = [], list[SpanGrowth](), list[int](), 0
        for group, ids in enumerate(blocks.get_block_ids()):
            # Tokens that one unit stands for: with blocks of several sizes, a unit is a block.
            tokens = engine.tokens_of(group) // per_block
            start, stop = (load.tokens - external) // tokens, -(-load.tokens // tokens)
            theirs = -(-handoff.num_tokens // max(tokens, handoff.block_size))
            begin, filled = start, list(ids[start // per_block : -(-stop // per_block)])
            if group in engine.state_groups:
                page = recurrent_state.page(ids, load.tokens, engine.state_groups[group])
                begin, filled = stop - 1, [page]
            while engine.windows and filled and filled[0] == NULL_BLOCK:
                begin, filled = begin + 1, filled[1:]  # with windows, a unit is a block
            if filled:
                grows = SpanGrowth(before, tokens, max(tokens, handoff.block_size))
                for first, last, is_late in self._split(group, begin, stop, handoff):
                    spans.append((before + first, before + last))
                    growth.append(grows._replace(block=0) if is_late else grows)
                ours += filled
            before += theirs * max(1, handoff.block_size // tokens)
        return HandoffLoad(
            request_id,
            handoff.lease,
            handoff.endpoints,
            (handoff.layers, self._layers),
            unit,
            tuple(spans),
            (load.tokens - external) // unit % per_block,
            ours,
            load.problem,
            handoff.stream,
            handoff.prompt(),
            per_block,
            tuple(growth),
            load.span is not None,
        )

    def _split(
        self, group: int, begin: int, stop: int, handoff: Handoff
    ) -> Iterator[tuple[int, int, bool]]:
        """Units [begin, stop) of a group in parts, each with whether it goes last, if followed."""
        engine, earliest = self._engine, 0 if not handoff.stream else None
        if handoff.stream and group not in engine.state_groups:
            earliest = engine.final_from(group, handoff.num_tokens)
        middle = stop if earliest is None else min(stop, max(begin, earliest))
        if begin < middle:
            yield begin, middle, True
        if middle < stop:
            yield middle, stop, False

    def is_loading(self) -> bool:
        """Whether a load is under way. It ends at its deadline at the latest. A load that waits for
        a prompt to be computed elsewhere counts only while it gets on."""
        recently = self._clock() - PATIENCE_S
        return any(
            load.state is PendingLoadState.LOADING
            and (not load.handoff.stream or load.moved > recently)
            for load in self._loads.values()
        )

    def only_waits(self) -> bool:
        """Whether all loads wait for prompts that are still computed elsewhere, so that a look some
        milliseconds later is soon enough."""
        waiting = [load for load in self._loads.values() if load.state in _UNDER_WAY]
        return bool(waiting) and all(not load.has_begun or load.grows for load in waiting)

    # ---- its end ---------------------------------------------------------------------------

    def request_finished(self, request_id: str) -> None:
        """Cancel the load of a request that ends, or release its lease."""
        load = self._loads.get(request_id)
        if load is None:
            return
        if load.state is PendingLoadState.LOADING:
            # vLLM keeps the blocks until the worker reports; the load stays until then.
            load.cancelled = True
            self._work.cancels.append(request_id)
            return
        if load.state in (PendingLoadState.QUEUED, PendingLoadState.SHARED):
            self._stats.count("handoffs", "none|aborted")
        if load.state is PendingLoadState.QUEUED:
            self._release(load.handoff)
        if not load.has_begun:
            self._work.unwatched.append(request_id)
        del self._loads[request_id]

    def _release(self, handoff: Handoff) -> None:
        # A pure producer has no connections to other producers; there the lease expires.
        if handoff.endpoints and self.consumes:
            name = handoff.lease, handoff.endpoints, handoff.stream
            self._work.releases.append(LeaseMessage(*name))

    def reset(self) -> None:
        """Compute all pending prompts locally: the weights may have changed."""
        for request_id, load in self._loads.items():
            if load.state is PendingLoadState.LOADING:
                self._work.cancels.append(request_id)
            elif load.state is PendingLoadState.QUEUED and load.problem is None:
                load.state = PendingLoadState.DONE
                self._stats.count("handoffs", "none|aborted")
                self._release(load.handoff)
                if not load.has_begun:
                    self._work.unwatched.append(request_id)

    # ---- each step -------------------------------------------------------------------------

    def step_work(self) -> StepWork:
        """The loads, cancels, releases and renewals of this step."""
        self._renew_queued()
        work, self._work = self._work, StepWork()
        return work

    def _renew_queued(self) -> None:
        now, every = self._clock(), self._settings.lease_s / 3
        for load in self._loads.values():
            waits = load.state is PendingLoadState.QUEUED and load.has_begun
            if waits and now - load.renewed > every:
                load.renewed = now
                if load.problem is None:
                    handoff = load.handoff
                    name = handoff.lease, handoff.endpoints, handoff.stream
                    self._work.renewals.append(LeaseMessage(*name))

    def update(self, reports: Iterable[LoadReport], received: Iterable[str]) -> None:
        """reports: of single ranks. received: request ids whose load ended on all ranks."""
        for report in reports:
            self._reports.setdefault(report.request_id, []).append(report)
        for request_id in received:
            load = self._loads.get(request_id)
            if load is None or load.state is not PendingLoadState.LOADING:
                continue  # another connector of this engine loaded it
            load.state = PendingLoadState.DONE
            of_request = self._reports.pop(request_id)
            self._count_load(of_request, load)
            if all(report.outcome == "loaded" for report in of_request):
                self._end_loads_of(load.handoff)
            if load.cancelled:
                del self._loads[request_id]

    def _end_loads_of(self, handoff: Handoff) -> None:
        """The lease was fetched. Its other requests (n > 1) find whole blocks in the prefix cache
        and compute the rest."""
        for other in self._loads.values():
            if other.problem is not None:
                continue  # strict mode: it has to fail, whatever happens to the lease
            if other.state is PendingLoadState.QUEUED and other.handoff == handoff:
                other.state = PendingLoadState.SHARED

    def _count_load(self, reports: list[LoadReport], load: PendingLoad) -> None:
        worst = next((r for r in reports if r.outcome != "loaded"), reports[0])
        size = sum(r.num_bytes for r in reports)
        hidden = sum(r.hidden_bytes for r in reports)
        if load.span is not None:
            if load.handoff.stream:
                load.span.followed(hidden)
            load.span.add([event for r in reports for event in r.events], load.tokens)
            load.span.end(worst.outcome, worst.transport, size, worst.reason)
        if load.problem is None:
            self._stats.count("handoffs", f"{worst.transport}|{worst.outcome}")
        if worst.outcome == "loaded":
            self._stats.count("bytes", worst.transport, size)
            if hidden:
                self._stats.count("hidden", worst.transport, hidden)
            self._stats.observe_seconds(max(r.seconds for r in reports))
        elif worst.outcome == "failed" and load.problem is None:
            self._stats.count("failures", worst.reason or "transfer")

    def take_stats(self) -> ConnectorStats:
        """Counts since the last call."""
        stats, self._stats = self._stats, ConnectorStats()
        return stats


def _nobodys(block_size: int) -> Handoff:
    """Of a load that only fails."""
    return Handoff("", -1, [], [], 0, block_size, b"")
