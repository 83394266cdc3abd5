"""What the producer's scheduler does: vLLM's, and the half that tells the workers."""

from __future__ import annotations

from collections.abc import Iterator

from spec.growing.state import (
    ACTIONS,
    CHUNKS,
    ENDED,
    OTHER,
    RUNNING,
    WAITING,
    Follows,
    Message,
    Producer,
    Request,
    Setup,
    State,
    Step,
    Writes,
    free_blocks,
    with_producer,
)

_SCHEDULER = "disagg.connector.handoff.producer_scheduler.ProducerScheduler"
_GROWING = "disagg.connector.handoff.growing_leases.GrowingLeases"
_VLLM = "vllm.v1.core.sched.scheduler.Scheduler"


@ACTIONS.add(
    "vLLM schedules a step of the prompt, or of others",
    "chance",
    f"{_VLLM}.schedule",
    f"{_VLLM}._preempt_request",
    f"{_SCHEDULER}.add_step_work",
    f"{_GROWING}.step",
)
def schedule(setup: Setup, state: State) -> Iterator[State]:
    """Computes the prompt's next chunk, takes its blocks away, or neither; and may write another
    request's KV into a free block."""
    producer = state.producer
    if not producer.alive or producer.step is not None or len(producer.device) > 1:
        return
    for after, writes in (*_computes(setup, producer), *_loses(setup, producer), (producer, ())):
        for others in _others(after):
            if others or after != producer:
                yield from _sent(setup, state, after, (*others, *writes))


def _computes(setup: Setup, producer: Producer) -> Iterator[tuple[Producer, Writes]]:
    request, weights = producer.request, producer.weights
    if request.status == ENDED or request.computed == CHUNKS:
        return
    # Blocks that go back are used in the other order, as in vLLM's queue of free blocks.
    order = -1 if request.preemptions % 2 else 1
    block, *more = free_blocks(producer)[::order]
    blocks, chunk = (*request.blocks, block), request.computed
    writes: Writes = ((block, (weights, chunk)),)
    runs = request._replace(status=RUNNING, blocks=blocks, computed=chunk + 1)
    yield producer._replace(request=runs), writes
    if "share" in setup.can and request.status == WAITING:
        # Another request of this step computes the first block, and the prompt shares it.
        hits = runs._replace(blocks=(*blocks, more[0]), computed=chunk + 2)
        yield producer._replace(request=hits), (*writes, (more[0], (weights, chunk + 1)))


def _loses(setup: Setup, producer: Producer) -> Iterator[tuple[Producer, Writes]]:
    request = producer.request
    if request.status == RUNNING and request.preemptions < setup.preemptions:
        yield producer._replace(request=preempted(request)), ()


def preempted(request: Request) -> Request:
    """As vLLM's `_preempt_request`."""
    return Request(preemptions=request.preemptions + 1)


def _others(producer: Producer) -> Iterator[Writes]:
    yield ()
    for block in free_blocks(producer):
        if producer.contents[block] != OTHER or producer.device:
            yield ((block, OTHER),)


def _sent(setup: Setup, state: State, after: Producer, writes: Writes) -> Iterator[State]:
    is_scheduled = after.request.computed > state.producer.request.computed
    # vLLM asks for the work before it counts what this step computes. A prefix hit counts already.
    counts = is_scheduled and setup.mutant != "a step's own blocks are final"
    follows, work = _told(setup, after, after.request.computed - counts, is_scheduled)
    work = (*work, *after.pending)
    for early in (False, True) if writes and work else (False,):
        yield with_producer(
            state,
            request=after.request,
            follows=follows,
            is_asked=after.is_asked and not is_scheduled,
            pending=(),
            step=Step(early, writes, work),
        )


def _told(
    setup: Setup, producer: Producer, tokens: int, is_scheduled: bool
) -> tuple[Follows | None, tuple[Message, ...]]:
    """As `GrowingLeases.step`."""
    request, follows = producer.request, producer.follows
    work: list[Message] = []
    if producer.is_asked and is_scheduled:
        follows = Follows(request.preemptions)
        work.append(Message("grow"))
    if follows is None:
        return None, tuple(work)
    if request.preemptions != follows.preemptions:
        follows = Follows(request.preemptions, follows.epoch + 1)
        work.append(Message("anew", follows.epoch))
    if follows.is_first_step and setup.mutant != "the first step's blocks are final":
        return follows._replace(is_first_step=not is_scheduled), tuple(work)
    if tokens > follows.told:
        added = request.blocks[follows.told : tokens]
        work.append(Message("grown", follows.epoch, tokens, follows.told, added))
        follows = follows._replace(told=tokens)
    return follows._replace(is_first_step=False), tuple(work)


@ACTIONS.add(
    "a step without the prompt tells the workers how it ended", "producer", f"{_GROWING}.add_work"
)
def tell(setup: Setup, state: State) -> Iterator[State]:
    producer = state.producer
    if producer.alive and producer.step is None and producer.pending:
        yield with_producer(state, pending=(), step=Step(False, (), producer.pending))


@ACTIONS.add(
    "the prefill that is followed ends and is granted its lease",
    "chance",
    f"{_SCHEDULER}.request_finished",
    f"{_GROWING}.ends",
)
def finish(setup: Setup, state: State) -> Iterator[State]:
    """Its last step is done."""
    producer, request = state.producer, state.producer.request
    launched = (*producer.device, producer.step.writes if producer.step else ())
    is_under_way = any(content != OTHER for writes in launched for _, content in writes)
    if not producer.alive or request.status != RUNNING or request.computed < CHUNKS or is_under_way:
        return
    ended = request._replace(status=ENDED, blocks=())
    if producer.follows is None:
        # A reset has ended its lease; nobody follows the one that it gets now.
        yield with_producer(state, request=ended)
        return
    grant = Message("grant", blocks=request.blocks)
    yield with_producer(
        state,
        request=ended,
        follows=None,
        kept=request.blocks,
        pending=(*producer.pending, grant),
    )


@ACTIONS.add(
    "the prefill that is followed is aborted",
    "chance",
    f"{_SCHEDULER}.request_finished",
    f"{_GROWING}.stop",
)
def abort(setup: Setup, state: State) -> Iterator[State]:
    producer, request = state.producer, state.producer.request
    if not producer.alive or request.status == ENDED or "abort" not in setup.can:
        return
    pending = producer.pending
    if producer.is_asked:
        pending = (*pending, Message("unwanted"))
    elif producer.follows is not None and setup.mutant != "an aborted prompt's lease is not ended":
        pending = (*pending, Message("stop"))
    yield with_producer(
        state,
        request=request._replace(status=ENDED, blocks=()),
        follows=None,
        is_asked=False,
        pending=pending,
    )


@ACTIONS.add(
    "the producer of a followed prompt is reset",
    "chance",
    f"{_SCHEDULER}.revoke_all",
    f"{_GROWING}.forget",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.reset_prefix_cache",
)
def reset(setup: Setup, state: State) -> Iterator[State]:
    """It takes the running request's blocks away, and succeeds if no lease keeps any."""
    producer, request = state.producer, state.producer.request
    if not producer.alive or "reset" not in setup.can or producer.weights:
        return
    revoke, pending = Message("revoke"), producer.pending
    if revoke not in pending and not producer.is_asked:  # a lease that begins later has no part
        pending = (*pending, revoke)
    if request.status == RUNNING:
        request = preempted(request)
    weights = 0 if producer.kept else 1
    after = producer._replace(request=request, follows=None, pending=pending, weights=weights)
    if after != producer:
        yield state._replace(producer=after)
