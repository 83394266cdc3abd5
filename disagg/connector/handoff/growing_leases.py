"""The leases of prompts that are still being computed, in the producer's scheduler.

Each step tells the workers which of a prompt's blocks are final once all earlier steps are done. So
a block counts one step after it was computed, whoever computed it: vLLM lets requests of one step
share blocks that this very step fills.

The blocks are the running request's. If it loses them (preemption), its lease begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg.connector.handoff import block_digests
from disagg.connector.handoff.engine_facts import EngineFacts
from disagg.connector.handoff.messages import Growing, Grown, GrownReport, StepWork
from disagg.connector.handoff.spans import GrowthSpan, open_tracer
from disagg.transport.control.ticket import prompt_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

BlockIds = Callable[[str], Sequence[list[int]]]
"""A request's block ids now, by KV cache group in prompt order."""


@dataclass
class _GrowingLease:
    """request: as vLLM's scheduler keeps it. tokens: those told to the workers. preemptions: of the
    request, when the lease last began. is_first_step: its blocks may still be filled by it."""

    request: Request
    stream: bytes
    number: int
    preemptions: int
    epoch: int = 0
    tokens: int = 0
    is_first_step: bool = True


class GrowingLeases:
    """Those of one engine."""

    def __init__(self, engine: EngineFacts) -> None:
        self._engine = engine
        self._asked: dict[str, tuple[Request, bytes]] = {}
        self._leases: dict[str, _GrowingLease] = {}
        self._streams: set[bytes] = set()
        self._come: list[str] = []  # requests that were asked since the last step
        self._work = StepWork()
        self._tracer = open_tracer()
        self._spans: dict[int, GrowthSpan] = {}
        self._stopped: list[int] = []  # whose spans the workers may still report of

    def asked(self, request: Request, stream: bytes) -> None:
        """A prefill leg names the stream that its consumer follows. With n > 1, the first request
        alone has it."""
        if stream in self._streams:
            return
        if block_digests.hashable(request):
            self._asked[request.request_id] = request, stream
            self._come.append(request.request_id)
            self._streams.add(stream)
        else:
            self._work.unwanted.append(stream)

    def will_not_grow(self, stream: bytes) -> None:
        """This prompt can't be handed off."""
        self._work.unwanted.append(stream)

    def step(
        self, scheduled: Collection[str], blocks: BlockIds, next_number: Callable[[], int]
    ) -> None:
        """A step was scheduled, with these requests. blocks: of a running request."""
        for request_id in [one for one in self._asked if one in scheduled]:
            request, stream = self._asked.pop(request_id)
            self._begin(request, stream, next_number())
        for request_id, lease in self._leases.items():
            self._follow(lease, request_id in scheduled, blocks)

    def ends(self, request_id: str) -> int | None:
        """The request has finished. Returns the number of its lease, to be granted or stopped; None
        if it has none."""
        if request_id in self._asked:
            _, stream = self._asked.pop(request_id)
            self._streams.discard(stream)
            self._work.unwanted.append(stream)
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return None
        self._stop_span(lease.number)
        self._streams.discard(lease.stream)
        return lease.number

    def stop(self, number: int) -> None:
        """A lease that ended will not be granted."""
        self._work.stopped.append(number)

    def forget(self) -> None:
        """The workers were told to end all leases."""
        for lease in self._leases.values():
            self._stop_span(lease.number)
        self._streams.difference_update(lease.stream for lease in self._leases.values())
        self._leases.clear()

    def reported(self, reports: Iterable[GrownReport]) -> None:
        """When traced leases grew."""
        for report in reports:
            if report.lease in self._spans:
                self._spans[report.lease].grown(report)

    def _stop_span(self, number: int) -> None:
        if number in self._spans:
            self._spans[number].stop()
            self._stopped.append(number)

    def add_work(self, work: StepWork) -> None:
        """Add what the workers have to know in this step."""
        mine, self._work = self._work, StepWork()
        work.growing, work.grown = mine.growing, mine.grown
        work.stopped, work.unwanted = mine.stopped, mine.unwanted
        work.queued = [self._asked[one][1] for one in self._come if one in self._asked]
        self._come.clear()
        # The step before has reported, also of leases that ended with it.
        while self._stopped:
            self._spans.pop(self._stopped.pop()).end()

    def _begin(self, request: Request, stream: bytes, number: int) -> None:
        engine, tokens = self._engine, request.num_prompt_tokens
        digests = engine.digests.of(request, engine.block_size, tokens)
        growing = Growing(
            number, request.request_id, stream, prompt_digest(digests), sum(self._counts(tokens))
        )
        self._work.growing.append(growing)
        lease = _GrowingLease(request, stream, number, request.num_preemptions)
        self._leases[request.request_id] = lease
        if self._tracer is not None and request.trace_headers:
            self._spans[number] = GrowthSpan(self._tracer, request.trace_headers)

    def _follow(self, lease: _GrowingLease, is_scheduled: bool, blocks: BlockIds) -> None:
        request = lease.request
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.num_preemptions != lease.preemptions or tokens < lease.tokens:
            lease.preemptions, lease.tokens = request.num_preemptions, 0
            lease.is_first_step = True
            lease.epoch += 1
            self._work.grown.append(Grown(lease.number, lease.epoch, 0, []))
        if lease.is_first_step:
            lease.is_first_step = not is_scheduled
            return
        if tokens == lease.tokens:
            return
        added = list(self._added(lease.tokens, tokens, request, blocks(request.request_id)))
        lease.tokens = tokens
        if added:
            is_traced = lease.number in self._spans
            self._work.grown.append(Grown(lease.number, lease.epoch, tokens, added, is_traced))

    def _added(
        self, before: int, tokens: int, request: Request, blocks: Sequence[list[int]]
    ) -> Iterator[tuple[int, list[int]]]:
        """The whole blocks that are final with so many tokens, and were not before."""
        engine, position = self._engine, 0
        for group, count in enumerate(self._counts(request.num_prompt_tokens)):
            size = engine.tokens_of(group)
            earliest = engine.final_from(group, request.num_prompt_tokens)
            if earliest is not None:
                first, last = max(earliest, before // size), tokens // size
                if first < last:
                    yield position + first, blocks[group][first:last]
            position += count

    def _counts(self, tokens: int) -> list[int]:
        """How many blocks of each KV cache group a lease of so many tokens has."""
        groups = self._engine.groups if self._engine.windows else 1
        return [-(-tokens // self._engine.tokens_of(group)) for group in range(groups)]
