"""What engines do with their requests and leases.

While a request is queued at its decode engine, that engine renews the lease in time. So a lease
expires only after its total life.
"""

from __future__ import annotations

from collections.abc import Iterator

from spec.actions import Actions
from spec.engines.state import (
    AT_DECODE,
    AT_PREFILL,
    DONE,
    GROWN,
    LOADED,
    LOADING,
    LOCAL,
    NEW,
    NONE,
    PREEMPTED,
    PREFILLING,
    READING,
    RUNNING,
    Setup,
    State,
    free,
    heads,
    heads_queue,
    joins_queue,
    leaves_queue,
    loads,
    moved,
    queued_at,
    runs,
)

_PRODUCER = "disagg.connector.handoff.producer_scheduler.ProducerScheduler"
_CONSUMER = "disagg.connector.handoff.consumer_scheduler.ConsumerScheduler"
_WORKER = "disagg.connector.handoff.consumer_worker.ConsumerWorker"
_LEASES = "disagg.transport.control.lease.LeaseTable"
_VLLM = "vllm.v1.core.sched.scheduler.Scheduler"

ACTIONS: Actions[Setup, State] = Actions()
"""Each is by an engine (it computes), by queue (it begins a load), by load (a load that has begun),
by patience or by life (time that passes), or by chance (it need not happen)."""


@ACTIONS.add(
    "a request arrives",
    "chance",
    "disagg.connector.handoff.scheduler.SchedulerHalf.on_new_request",
)
def arrive(setup: Setup, state: State) -> Iterator[State]:
    for request in set(state.requests):
        if request.phase == NEW:
            local = setup.kind(request).prefill == NONE
            new = request._replace(phase=LOCAL if local else AT_PREFILL)
            yield joins_queue(setup, state, request, new)


# ---- vLLM's scheduler ----------------------------------------------------------------------------


@ACTIONS.add("an engine schedules a prompt to compute", "engine", f"{_VLLM}.schedule")
def schedule(setup: Setup, state: State) -> Iterator[State]:
    following = {AT_PREFILL: PREFILLING, LOCAL: RUNNING, PREEMPTED: GROWN}
    for _, request, room in heads(setup, state):
        if room and request.phase == LOADED:
            yield moved(state, request, request._replace(phase=RUNNING))
        elif room and request.phase in following:
            yield leaves_queue(setup, state, request, following[request.phase])


@ACTIONS.add(
    "an engine begins a load",
    "queue",
    f"{_VLLM}.schedule",
    f"{_CONSUMER}.num_new_matched_tokens",
    f"{_CONSUMER}.after_alloc",
)
def begin_load(setup: Setup, state: State) -> Iterator[State]:
    for _, request, room in heads(setup, state):
        if room and request.phase == AT_DECODE:
            yield leaves_queue(setup, state, request, LOADING)


@ACTIONS.add("an answer needs another block", "engine", f"{_VLLM}.schedule")
def grow(setup: Setup, state: State) -> Iterator[State]:
    """Without a free block, vLLM preempts a request that runs; here it may be any one."""
    for request in set(state.requests) if setup.grows else ():
        engine = setup.kind(request).decode
        if request.phase != RUNNING:
            continue
        if free(setup, state, engine):
            yield moved(state, request, request._replace(phase=GROWN))
            continue
        for victim in set(state.requests):
            if setup.kind(victim).decode == engine and victim.phase in (RUNNING, GROWN):
                needs_more = victim.phase == GROWN or victim == request
                phase = PREEMPTED if needs_more else LOCAL
                yield heads_queue(setup, state, victim, victim._replace(phase=phase))


@ACTIONS.add("a request is answered", "engine", f"{_VLLM}.update_from_output")
def finish(setup: Setup, state: State) -> Iterator[State]:
    for request in set(state.requests):
        if request.phase == (GROWN if setup.grows else RUNNING):
            yield moved(state, request, request._replace(phase=DONE))


# ---- leases and loads ----------------------------------------------------------------------------


@ACTIONS.add(
    "a prefill ends; its blocks are leased",
    "engine",
    f"{_PRODUCER}.request_finished",
    f"{_LEASES}.grant",
)
def end_prefill(setup: Setup, state: State) -> Iterator[State]:
    for request in set(state.requests):
        if request.phase == PREFILLING:
            new = request._replace(phase=AT_DECODE, lease=True)
            yield joins_queue(setup, state, request, new)


@ACTIONS.add("a load acquires its lease", "load", f"{_WORKER}._load", f"{_LEASES}.acquire")
def acquire(setup: Setup, state: State) -> Iterator[State]:
    for request in set(state.requests):
        if request.phase == LOADING and request.lease:
            yield moved(state, request, request._replace(phase=READING))


@ACTIONS.add(
    "a load finds its lease gone",
    "load",
    f"{_WORKER}._load_and_report",
    f"{_CONSUMER}.update",
    f"{_VLLM}._update_waiting_for_remote_kv",
)
def fail_load(setup: Setup, state: State) -> Iterator[State]:
    """vLLM takes the blocks back, and the request waits at the front."""
    for request in set(state.requests):
        if request.phase == LOADING and not request.lease:
            yield heads_queue(setup, state, request, request._replace(phase=LOCAL))


@ACTIONS.add(
    "a load ends; its lease is released",
    "load",
    "disagg.transport.fetch.fetched",
    f"{_LEASES}.release",
    f"{_LEASES}.take_ended",
)
def end_load(setup: Setup, state: State) -> Iterator[State]:
    for request in set(state.requests):
        if request.phase == READING:
            phase = LOADED if setup.rest else RUNNING
            after = moved(state, request, request._replace(phase=phase, lease=False, old=False))
            lost = "no blocks are taken back while they are read"
            yield after if request.lease else after._replace(wrong=lost)


# ---- the two rules that end a wait ---------------------------------------------------------------


@ACTIONS.add(
    "a stuck engine takes back a lease",
    "patience",
    "disagg.connector.handoff.stall.StallWatch.stands_still",
    "disagg.connector.handoff.scheduler.SchedulerHalf.step_work",
    f"{_PRODUCER}.take_back_oldest",
    f"{_LEASES}.take_back",
)
def take_back(setup: Setup, state: State) -> Iterator[State]:
    """An engine that produces and consumes, runs nothing and loads nothing, and whose next request
    finds no room, takes back a lease. The code takes the oldest; here it may be any one. A lease
    that is read keeps its blocks until the read ends, as if it were not taken back."""
    if setup.mutant == "no lease is taken back":
        return
    for engine, head, room in heads(setup, state):
        if room or not setup.hands_off_both_ways(engine) or not is_idle(setup, state, engine):
            continue
        if setup.mutant == "leases are taken back for loads only" and head.phase != AT_DECODE:
            continue
        if setup.mutant == "leases are not taken back for loaded requests" and head.phase == LOADED:
            continue
        once = setup.mutant == "one lease is taken back, and never another"
        if once and engine in state.yielded:
            continue
        for request in set(state.requests):
            held = request.lease and setup.kind(request).prefill == engine
            read = (
                request.phase == READING and setup.mutant != "leases that are read are taken back"
            )
            if held and not read:
                after = moved(state, request, request._replace(lease=False, old=False))
                yielded = tuple(sorted({*state.yielded, engine})) if once else ()
                yield after._replace(yielded=yielded)


def is_idle(setup: Setup, state: State, engine: int) -> bool:
    """Whether the engine runs nothing and loads nothing, so that it frees no block by itself."""
    for request in state.requests:
        if runs(setup, request, engine):
            if setup.mutant != "leases are taken back while a request runs":
                return False
        if loads(setup, request, engine):
            if setup.mutant != "leases are taken back while a load is under way":
                return False
    return True


@ACTIONS.add(
    "a lease's total life passes: renewals are refused",
    "life",
    f"{_CONSUMER}._renew_queued",
    f"{_LEASES}.renew",
)
def pass_life(setup: Setup, state: State) -> Iterator[State]:
    if not setup.lives_pass or setup.mutant == "renewals have no limit":
        return
    for request in set(state.requests):
        if request.lease and not request.old:
            yield moved(state, request, request._replace(old=True))


@ACTIONS.add("a lease that is not renewed expires", "life", f"{_LEASES}.take_ended")
def expire(setup: Setup, state: State) -> Iterator[State]:
    for request in set(state.requests):
        if request.old and request.phase != READING:
            yield moved(state, request, request._replace(lease=False, old=False))


def show(setup: Setup, state: State) -> list[str]:
    """One line per request that has arrived; those of one kind are not told apart."""
    lines = []
    for request in state.requests:
        if request.phase == NEW:
            continue
        kind = setup.kind(request)
        path = f"{kind.prefill} -> {kind.decode}" if kind.prefill != NONE else f"{kind.decode}"
        line = f"request {path} of {kind.blocks} blocks: {request.phase}"
        if request.place != NONE:
            line += f", place {request.place} of engine {queued_at(setup, request)}"
        if request.lease:
            line += f"; engine {kind.prefill} holds its lease"
        lines.append(line + (", whose total life has passed" if request.old else ""))
    return lines
