"""The scheduler half: which chunks are stored and loaded, and whose blocks must be saved first.

A request's blocks are stored as they fill up, by references that vLLM does not know of: a block
may be freed and given to another request while its copy has not begun. Every step compares the
blocks that it hands out with those that are still to be copied, and has the workers finish these
copies before the forward pass (`flush`). So no request is ever held back by a store.

vLLM's second model runner zeroes and copies blocks before it calls the connector. The chunk
of such a block is not kept, unless its store had ended (`overwritten`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from disagg.connector.kv_cache_layout import NULL_BLOCK
from disagg.connector.offload.groups import Chunks
from disagg.connector.offload.jobs import LoadJob, ReadJob, StoreJob, WriteJob
from disagg.connector.offload.matching import Match, Matcher
from disagg.connector.offload.messages import (
    SLOW,
    Done,
    Filling,
    OffloadReport,
    OffloadWork,
    Read,
    Store,
    TierLoad,
    Write,
)
from disagg.connector.offload.metrics import OffloadStats
from disagg.connector.offload.pace import Pace
from disagg.connector.offload.settings import OffloadSettings
from disagg.connector.recurrent_state import page
from disagg.store.base import BlockEvent, IndexStats, Key, Slot
from disagg.store.host_index import HostIndex
from disagg.store.shared_index import SharedIndex
from disagg.vllm_compat.manager import block_table

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NEVER = sys.maxsize
_MOST_UNWRITTEN = 4096  # a disk or a store that is so far behind is left what is newest


@dataclass(eq=False)
class _Tracked:
    """A request of the engine's.

    `computed`: tokens whose blocks are right once the steps scheduled by now have run.
    `considered`: chunks that were stored, or found stored, but for states. `match`: what was last
    answered. `was_late`: its lookup. `too_slow`: the shared tier, for this request. `began`: the
    first step of the `to_compute` tokens; None again once it is measured how long they took.
    """

    request: Request
    computed: int = 0
    considered: int = 0
    match: Match | None = None
    asked: float | None = None
    loading: bool = False
    gave_up: bool = False
    was_late: bool = False
    too_slow: bool = False
    began: float | None = None
    to_compute: int = 0


class OffloadScheduler:
    """Scheduler side of `DisaggOffloadConnector`."""

    def __init__(
        self,
        settings: OffloadSettings,
        host: HostIndex,
        shared: SharedIndex | None,
        chunks: Chunks,
        *,
        world_size: int,
        layout: str = "",
        second_runner: bool = False,
    ) -> None:
        self._settings, self._host, self._shared = settings, host, shared
        self._second_runner = second_runner
        self._chunks, self._world_size = chunks, world_size
        self._matcher, self._own = Matcher(host, shared, chunks), Matcher(host, None, chunks)
        self._pace = Pace("" if shared is None else shared.name)
        self._too_slow = 0
        self._tracked: dict[str, _Tracked] = {}
        self._jobs: dict[int, StoreJob | LoadJob | WriteJob] = {}
        self._reads: dict[tuple[int, Key], ReadJob] = {}
        self._next_job = 0
        self._work = OffloadWork(layout=layout)
        self._allocated: set[int] = set()
        self._copying: dict[int, set[int]] = {}  # block -> stores that have not copied it yet
        self._unwritten: OrderedDict[Key, None] = OrderedDict()
        self._writing = 0
        self._stats = OffloadStats()
        self._reported: dict[str, IndexStats] = {}

    # ---- loading ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request arrived."""
        self._tracked[request.request_id] = _Tracked(request)

    def num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond `computed`; None: ask again later. Without side effects."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.gave_up or request.skip_reading_prefix_cache:
            return 0, False
        if tracked.loading:
            return None, False
        match = self._find(tracked, computed)
        if match is None:
            return None, False
        tracked.match, tracked.asked = match, None
        tokens = match.stop * self._chunks.tokens - computed
        return (tokens, True) if match.keys and tokens > 0 else (0, False)

    def _find(self, tracked: _Tracked, computed: int) -> Match | None:
        """What to load; None: ask again later. The shared tier only where it is fast enough."""
        request, shared = tracked.request, self._shared
        if shared is None or not self._pace.asks(request.request_id):
            if shared is not None:
                self._is_too_slow(tracked)
            match, later = self._own.find(request, computed)
            return None if later and not self._waited_enough(tracked, computed) else match
        overdue = shared.stats.slow
        match, later = self._matcher.find(request, computed)
        if later and not tracked.was_late and not self._waited_enough(tracked, computed):
            return None
        late = later or shared.stats.slow > overdue
        if not tracked.was_late and (late or tracked.asked is not None):
            self._pace.lookup_ended(late=late)
        if late:
            tracked.was_late = True
            self._is_too_slow(tracked)
        if match.in_shared:
            own, _ = self._own.find(request, computed)
            spared = (match.stop - own.stop) * self._chunks.tokens
            if not self._pace.pays(request.request_id, len(match.in_shared), spared):
                self._is_too_slow(tracked)
                return own
        return match

    def _is_too_slow(self, tracked: _Tracked) -> None:
        self._too_slow += not tracked.too_slow
        tracked.too_slow = True

    def _waited_enough(self, tracked: _Tracked, computed: int) -> bool:
        now = time.monotonic()
        tracked.asked = tracked.asked or now
        limit_s = self._pace.limit_s(tracked.request.num_tokens - computed)
        return now - tracked.asked > min(limit_s, self._settings.lookup_deadline_s)

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM allocated the blocks: begin the load that `num_new_matched_tokens` announced."""
        for of_group in blocks.blocks:
            # Blocks without a hash are new, and the load will write to them.
            self._allocated.update(block.block_id for block in of_group if block.block_hash is None)
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        self._touch(self._chunks.needed(request, self._chunks.loadable(request)))
        if not external or tracked.match is None:
            return
        match, tracked.match, tracked.loading = tracked.match, None, True
        held = self._host.begin_load([key for key in match.keys if key not in match.in_shared])
        to_read = self._host.prepare_store([key for key in match.keys if key in match.in_shared])
        slots = {slot.key: slot for slot in (*held, *to_read)}
        if len(slots) < len(match.keys):
            # Cannot happen within one scheduler step; if it does, the load fails.
            self._host.complete_store(to_read, False)
            slots, to_read = {}, []
        job = LoadJob(self._world_size, held, request_id=request.request_id, shared=len(to_read))
        number = self._new_job(job)
        self._begin_reads(number, to_read)
        span = range(match.computed, match.computed + external)
        fillings = [
            Filling([slots[key] for key in filled.keys if slots], filled.skip, filled.block_ids)
            for part, table in zip(match.parts, blocks.get_block_ids(), strict=True)
            for filled in self._chunks.to_fill(part.group, part.first, part.keys, table, span)
        ]
        from_shared = frozenset(slot.key for slot in to_read)
        limit_s = self._pace.limit_s(external)
        load = TierLoad(number, request.request_id, fillings, from_shared, limit_s)
        self._work.loads.append(load)

    def _begin_reads(self, number: int, slots: Sequence[Slot]) -> None:
        load = self._jobs[number]
        assert isinstance(load, LoadJob)
        begun = set[Key]()
        if self._shared is not None and slots:
            begun.update(self._shared.begin_load([slot.key for slot in slots]))
        for slot in slots:
            job = ReadJob(self._world_size, [slot], load=load, begun=slot.key in begun)
            self._reads[number, slot.key] = job

    def _touch(self, keys: list[Key]) -> None:
        """A prompt was used again: keep its chunks in all tiers, wherever it is loaded from."""
        self._host.touch(keys)
        if self._shared is not None:
            self._work.touched += keys

    # ---- storing ---------------------------------------------------------------------------

    def step_work(self, output: SchedulerOutput) -> OffloadWork:
        """What the workers have to do in this step."""
        written = _newly_written(output, self._chunks.block_sizes)
        # Before this step's own stores: they copy what this step writes.
        first = self._written_first(output, written)
        self._work.overwritten = self._still_copying(first)
        self._work.flush = set(self._still_copying((written | self._allocated) - first))
        self._allocated.clear()
        blocks = output.kv_connector_block_state
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or blocks is None:
                continue
            request = tracked.request
            self._measure(tracked)
            tracked.computed = min(request.num_computed_tokens + count, request.num_tokens)
            if tracked.computed // self._chunks.tokens > tracked.considered:
                tables = block_table(blocks, request_id)
                if tables is not None:
                    self._store_filled(tracked, tables)
            if self._chunks.stateful and tracked.considered != _NEVER:
                self._store_states(request, count, blocks)
        work, self._work = self._work, OffloadWork()
        return work

    def _measure(self, tracked: _Tracked) -> None:
        """How long a prompt takes to compute, from its first step to its first new token."""
        request = tracked.request
        if tracked.began is None:
            if not tracked.to_compute and not request.num_output_tokens:
                tracked.began = time.monotonic()
                tracked.to_compute = request.num_tokens - request.num_computed_tokens
        elif request.num_output_tokens:
            self._pace.computed(tracked.to_compute, time.monotonic() - tracked.began)
            tracked.began = None

    def _still_copying(self, blocks: Iterable[int]) -> dict[int, set[int]]:
        """The stores that have not copied some of these blocks yet, and which ones."""
        found = dict[int, set[int]]()
        for block in blocks:
            for job in self._copying.get(block, ()):
                found.setdefault(job, set()).add(block)
        return found

    def _written_first(self, output: SchedulerOutput, written: set[int]) -> set[int]:
        """Of the blocks that a step writes to: those that vLLM's model runner may write to before
        it calls the connector."""
        if not self._second_runner:
            return set()
        if self._chunks.stateful:
            return written  # it copies states into new blocks, and chooses them on the device
        return _zeroed_or_copied(output)

    def request_finished(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Store what the request has computed since; its blocks are about to be freed.

        tables: its block ids, by KV cache group.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._measure(tracked)
        computed = min(tracked.computed, request.num_computed_tokens)
        if request.status is not RequestStatus.FINISHED_ABORTED:
            # The last token was sampled, but not computed.
            computed = min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))
        tracked.computed = computed
        self._store_filled(tracked, tables, complete=True)
        self._host.refresh(self._chunks.needed(request, computed // self._chunks.tokens))

    def _store_filled(
        self, tracked: _Tracked, tables: Sequence[Sequence[int]], *, complete: bool = False
    ) -> None:
        tracked.considered, filled = self._chunks.filled(
            tracked.request, tracked.considered, tracked.computed, tables
        )
        self._store(filled, complete=complete)

    def _store_states(self, request: Request, count: int, blocks: KVConnectorBlockState) -> None:
        """States after whole blocks: at the begin and at the end of a step of `count` tokens, each
        in the block of its last token, and the states that vLLM keeps in between.

        At a step's end the last token may not be known yet; it is when the next step begins.
        """
        begin = request.num_computed_tokens
        kept = blocks.boundary_state_offloads.get(request.request_id, ())
        before, after = (
            self._states_at(request, tokens, blocks) for tokens in (begin, begin + count)
        )
        # vLLM frees the block of the state at the begin with the next step.
        self._store(self._chunks.states(request, before), complete=True)
        self._store(self._chunks.states(request, [*kept, *after]))

    def _states_at(
        self, request: Request, tokens: int, blocks: KVConnectorBlockState
    ) -> list[tuple[int, int, int]]:
        """The states after so many tokens, as `Chunks.states` takes them; none within a block."""
        size = self._chunks.block_size
        tables = block_table(blocks, request.request_id) if tokens % size == 0 else None
        if not tokens or tables is None:
            return []
        return [(n, page(tables[n], tokens, size), tokens) for n in self._chunks.stateful]

    def _store(self, filled: Mapping[Key, Sequence[int]], *, complete: bool = False) -> None:
        """filled: the blocks of each chunk. complete: earlier steps computed them."""
        slots = self._host.prepare_store([*filled])
        if not slots:
            return
        ids = [id_ for slot in slots for id_ in filled[slot.key]]
        copied = frozenset(ids) - {NULL_BLOCK}
        number = self._new_job(StoreJob(self._world_size, slots, block_ids=copied))
        for id_ in copied:
            self._copying.setdefault(id_, set()).add(number)
        self._work.stores.append(Store(number, slots, ids, complete))

    def _new_job(self, job: StoreJob | LoadJob | WriteJob) -> int:
        number, self._next_job = self._next_job, self._next_job + 1
        self._jobs[number] = job
        return number

    # ---- reports of the workers -----------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether the engine has to keep stepping, even without requests."""
        return bool(self._jobs or self._reads)

    def update(self, output: KVConnectorOutput) -> None:
        """Process the workers' reports."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, OffloadReport):
            return
        for read in report.reads:
            self._read_ended(read)
        for done in report.done:
            self._job_ended(done)
        if self._shared is not None:
            self._shared.evicted(report.evicted)

    def _read_ended(self, read: Read) -> None:
        self._stats.moved("STORAGE_to_CPU", read.num_bytes, read.seconds, read.reason)
        job = self._reads[read.job, read.slot.key]
        job.waiting -= 1
        if read.ok:
            self._pace.read(read.seconds)
        else:
            job.failed.add(read.slot.key)
        if job.waiting:
            return
        del self._reads[read.job, read.slot.key]
        ok = not job.failed
        # Keep the slot while it is copied into blocks, even if it was cleared.
        copied = job.load is not None and job.load.waiting > 0
        pinned = self._host.complete_store(job.slots, ok, pin=copied)
        if job.load is not None:
            job.load.read += pinned
        if self._shared is not None and job.begun:
            self._shared.end_load([read.slot.key], ok)

    def _job_ended(self, done: Done) -> None:
        self._stats.moved(done.medium, done.num_bytes, done.seconds, done.reason)
        job = self._jobs[done.job]
        job.waiting -= 1
        job.failed |= done.failed
        if isinstance(job, LoadJob):
            job.seconds = max(job.seconds, done.seconds)
            job.was_slow |= done.reason == SLOW
        if job.waiting:
            return
        del self._jobs[done.job]
        match job:
            case StoreJob():
                self._stored(done.job, job)
            case LoadJob():
                self._loaded(job)
            case WriteJob():
                self._written(job)

    def _stored(self, number: int, job: StoreJob) -> None:
        for block in job.block_ids:
            self._copying[block].discard(number)
            if not self._copying[block]:
                del self._copying[block]
        ok = [slot for slot in job.slots if slot.key not in job.failed]
        self._host.complete_store(ok, True)
        self._host.complete_store([slot for slot in job.slots if slot.key in job.failed], False)
        if self._shared is not None:
            # Once per key, even if it was evicted and stored again before it was written.
            self._unwritten.update((slot.key, None) for slot in ok)
            while len(self._unwritten) > _MOST_UNWRITTEN:
                self._unwritten.popitem(last=False)
            self._write(self._shared)

    def _write(self, shared: SharedIndex) -> None:
        """Let stored chunks be written to the shared tier. Writes pin at most half of the slots,
        so that a slow disk or store does not block them all. Chunks evicted before their write are
        not written."""
        slots = list[Slot]()
        while self._unwritten and self._writing + len(slots) < max(
            1, self._host.stats.capacity // 2
        ):
            slots += self._host.pin([self._unwritten.popitem(last=False)[0]])
        wanted = set(shared.prepare_store([slot.key for slot in slots]))
        self._host.unpin([slot for slot in slots if slot.key not in wanted])
        slots = [slot for slot in slots if slot.key in wanted]
        if slots:
            self._writing += len(slots)
            number = self._new_job(WriteJob(self._world_size, slots))
            self._work.writes.append(Write(number, slots))

    def _loaded(self, job: LoadJob) -> None:
        self._host.end_load(job.slots, not job.failed)
        self._host.unpin(job.read)
        tracked = self._tracked.get(job.request_id)
        if tracked is not None:
            tracked.loading = False
            tracked.gave_up = bool(job.failed)
            if job.was_slow:
                self._is_too_slow(tracked)
        if job.shared and not job.failed:
            self._pace.loaded(job.shared, job.seconds)
        elif job.was_slow and job.seconds:  # not one that another load's lateness ended
            self._pace.late_load(job.shared, job.seconds)

    def _written(self, job: WriteJob) -> None:
        assert self._shared is not None
        self._host.unpin(job.slots)
        self._writing -= len(job.slots)
        keys = [slot.key for slot in job.slots]
        self._shared.complete_store([key for key in keys if key not in job.failed], True)
        self._shared.complete_store([key for key in keys if key in job.failed], False)
        self._write(self._shared)

    # ---- events and counters --------------------------------------------------------------

    def take_events(self) -> Iterable[BlockEvent]:
        """Chunks that were stored in a tier, or removed, since the last call."""
        yield from self._host.take_events()
        if self._shared is not None:
            yield from self._shared.take_events()

    def take_stats(self) -> OffloadStats:
        """Counts since the last call; for the tiers, only those that changed."""
        tiers = {"host": self._host.stats}
        if self._shared is not None:
            tiers[self._shared.name] = replace(self._shared.stats, too_slow=self._too_slow)
        for name, now in tiers.items():
            if self._reported.get(name) != now:
                self._reported[name] = now
                self._stats.set_tier(name, now)
        stats, self._stats = self._stats, OffloadStats()
        return stats

    def shutdown(self) -> None:
        """Stop the shared tier's lookup threads."""
        if self._shared is not None:
            self._shared.close()

    def reset(self) -> bool:
        """Clear the host tier, since the weights may have changed; vLLM gives no more detail. Files
        are not used either after this, unless the settings say that weights never change. They
        stay, because other engines share them."""
        self._host.clear()
        for tracked in self._tracked.values():
            tracked.considered = _NEVER  # its blocks were computed before the reset
        if self._shared is not None and not self._settings.reset_keeps_chunks:
            self._chunks.begin_anew()
        return True


def _newly_written(output: SchedulerOutput, block_sizes: Sequence[int]) -> set[int]:
    """Blocks that this step may write to, of all KV cache groups."""
    blocks = set[int]()
    for new in output.scheduled_new_reqs:
        for table, size in zip(new.block_ids, block_sizes, strict=True):
            blocks.update(table[new.num_computed_tokens // size :])
    for tables in output.scheduled_cached_reqs.new_block_ids:
        for table in tables or ():
            blocks.update(table)
    return blocks | _zeroed_or_copied(output)


def _zeroed_or_copied(output: SchedulerOutput) -> set[int]:
    """Blocks that the model runner writes to before the forward pass. Some may have no request: the
    one that they were allocated for was preempted in the same step."""
    blocks = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
    return blocks.union(output.new_block_ids_to_zero or ())
