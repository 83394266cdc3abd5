"""Messages about the leases of queued requests."""

from __future__ import annotations

from collections.abc import Iterator

from spec.handoff.producer import end, is_over
from spec.handoff.state import (
    ABORTED,
    ACTIONS,
    CANCELLED,
    DONE,
    IDLE,
    NONE,
    NOT_READ,
    QUEUED,
    Setup,
    State,
    find,
    for_each_consumer,
    with_consumer,
    with_lease,
)

_SESSION = "disagg.transport.control.server._Session"
_LEASES = "disagg.transport.control.lease.LeaseTable"
_SCHEDULER = "disagg.connector.handoff.consumer_scheduler.ConsumerScheduler"
_WORKER = "disagg.connector.handoff.consumer_worker.ConsumerWorker"


@ACTIONS.add(
    "a renewal arrives",
    "chance",
    f"{_SCHEDULER}._renew_queued",
    f"{_WORKER}._renew_share",
    "disagg.transport.fetch.renew",
    f"{_LEASES}.renew",
)
@for_each_consumer
def renew(setup: Setup, state: State, i: int) -> Iterator[State]:
    """Sent while the request is queued; it may arrive at any time after that."""
    producer, (life, number) = state.producer, setup.wants[i]
    if "renew" not in setup.can or state.consumers[i].phase == IDLE:
        return
    if not producer.alive or producer.life != life or producer.taking != NONE:
        return
    lease = find(producer, number)
    if lease is None or not (lease.passed or lease.kept):
        return
    renewed = lease._replace(passed=False, kept=NOT_READ)
    if lease.old:
        if setup.mutant != "a renewal past the total life extends a direct read":
            return
        renewed = lease._replace(kept=NOT_READ)
    if setup.mutant == "a renewal revives an ended lease" and lease.outcome:
        yield with_lease(state, renewed._replace(outcome=""))._replace(wrong="a lease ends once")
    elif not lease.outcome and not is_over(setup, state, lease):
        yield with_lease(state, renewed)


@ACTIONS.add("a queued request is aborted", "chance", f"{_SCHEDULER}.request_finished")
@for_each_consumer
def cancel(setup: Setup, state: State, i: int) -> Iterator[State]:
    if "cancel" in setup.can and state.consumers[i].phase == QUEUED:
        yield with_consumer(state, i, phase=CANCELLED, result="cancelled")


@ACTIONS.add(
    "the release of an aborted request arrives",
    "chance",
    f"{_WORKER}._release_share",
    "disagg.transport.fetch.release",
    f"{_SESSION}._release",
)
@for_each_consumer
def release_cancelled(setup: Setup, state: State, i: int) -> Iterator[State]:
    """It goes to the address in the ticket, where a later life may listen."""
    producer, (life, number) = state.producer, setup.wants[i]
    if state.consumers[i].phase != CANCELLED or producer.taking != NONE:
        return
    done = with_consumer(state, i, phase=DONE)
    lease = find(producer, number)
    same_life = producer.life == life or setup.mutant == "release ignores the generation"
    if not producer.alive or not same_life or lease is None or lease.outcome:
        yield done
    elif producer.life != life:
        yield end(setup, done, lease, ABORTED)._replace(
            wrong="a message ends leases of its own generation only"
        )
    else:
        yield end(setup, done, lease, ABORTED)
