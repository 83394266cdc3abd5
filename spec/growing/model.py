"""The runs of this model: their bounds, and the rules that are checked."""

from __future__ import annotations

from spec.checker import Model, Promise

# They register their actions.
from spec.growing import consumer, scheduler, worker  # noqa: F401
from spec.growing.state import ACTIONS, ENDED, IDLE, OTHER, Setup, State, initial
from spec.growing.worker import in_table

_ALL = frozenset({"abort", "cut", "consumer dies", "producer dies"})

READ = Setup("a prompt is followed, read", _ALL)
SENT = Setup("a prompt is followed, sent", _ALL, transport="sent")
DEVICE = Setup("a prompt is followed on a device, read", frozenset(), device=True)
DEVICE_SENT = Setup(
    "a prompt is followed on a device, sent",
    frozenset({"abort"}),
    transport="sent",
    device=True,
    preemptions=0,
)
SHARED = Setup("a followed prompt shares a block", frozenset({"share", "abort"}), blocks=3)
RESET = Setup("a followed prompt and a reset", frozenset({"reset", "cut"}))
AGAIN = Setup("a followed prompt begins anew twice", frozenset({"cut"}), preemptions=2)
SETUPS = (READ, SENT, DEVICE, DEVICE_SENT, SHARED, RESET, AGAIN)


def _holds_lease(state: State) -> bool:
    """Blocks are kept, or the lease of a request that has ended is in the table."""
    producer = state.producer
    ended = producer.request.status == ENDED and in_table(state) is not None
    return bool(producer.kept) or ended


def _fetches(state: State) -> bool:
    one = state.consumer
    return one.alive and one.phase != IDLE and not one.result


PROMISES = (
    # Whatever the consumer does.
    Promise(
        "every lease ends, and its blocks go back", _holds_lease, frozenset({"producer", "time"})
    ),
    # Whatever the producer does: also if it stops, or computes for ever.
    Promise("every fetch ends", _fetches, frozenset({"consumer", "time"})),
)


def broken(state: State) -> str:
    """The rule that this state breaks."""
    if state.wrong:
        return state.wrong
    lease = in_table(state)
    if lease is not None and lease.is_whole and lease.blocks != state.producer.kept:
        return "a whole lease keeps its blocks"
    return ""


def model(setup: Setup) -> Model[State]:
    return Model(
        name=setup.name,
        initial=initial(setup),
        actions=ACTIONS.bound(setup),
        broken=broken,
        may_rest=lambda state: not _holds_lease(state) and not _fetches(state),
        show=show,
        promises=PROMISES,
    )


def show(state: State) -> list[str]:
    """One line per fact."""
    p, one = state.producer, state.consumer
    lines = [f"producer: {'' if p.alive else 'dead, '}weights {p.weights}"]
    lines.append(f"prompt: {p.request}")
    for at, (weights, chunk) in enumerate(p.contents):
        owner = "prompt" if at in p.request.blocks else "lease" if at in p.kept else "nobody"
        what = "another request" if (weights, chunk) == OTHER else f"chunk {chunk} ({weights})"
        lines.append(f"block {at}: of the {owner}, content of {what}")
    lines += [f"{p.follows}"] * (p.follows is not None)
    lines += [f"for the next step: {message}" for message in p.pending]
    lines += [f"{p.step}"] * (p.step is not None)
    lines += [f"the device will write {writes}" for writes in p.device]
    lines += [f"waits for {ahead} launched steps: {message}" for ahead, message in p.late]
    lines += [f"{p.lease}"] * (p.lease is not None) + ["the stream is past"] * p.past
    facts = ["" if one.alive else "dead", one.phase, one.result]
    facts += ["connected"] * one.connected + ["in a session"] * one.session
    facts += ["uses the lease"] * one.using + ["silent"] * one.silent
    facts += [f"epoch {one.epoch}, {one.tokens} final"] + ["whole"] * one.is_whole
    facts += [f"copies blocks {one.rows}"] * bool(one.rows)
    facts += [f"has read {one.seen}"] * bool(one.seen)
    lines.append(f"consumer: {', '.join(filter(None, facts))}")
    return lines
