"""The runs of this model: their bounds, the rules that are checked, and the mutants."""

from __future__ import annotations

from dataclasses import replace

from spec.checker import Model, Promise
from spec.handoff import consumer, producer  # noqa: F401 - they register their actions
from spec.handoff.state import ACTIONS, DONE, IDLE, NONE, Setup, State, initial

_EVENTS = frozenset({"renew", "cancel", "copy fails", "cut", "consumer dies"})

_FEW = frozenset({"renew", "cut"})

SETUPS = (
    Setup("two leases in one block", ((0, 0), (0, 1)), _EVENTS, grants=(2,)),
    Setup("two leases in two blocks, one row", ((0, 0), (0, 1)), _EVENTS, grants=(2,), blocks=2, rows=1),
    Setup("one ticket used twice", ((0, 0), (0, 0)), _EVENTS | {"reset"}),
    Setup("two readers of a lease", ((0, 0), (0, 0)), _EVENTS | {"reset"}, readers=2),
    Setup("two readers of a lease, asked", ((0, 0), (0, 0)), _EVENTS | {"reset"}, readers=2, transport="asked"),
    Setup("sent", ((0, 0), (0, 1)), _EVENTS | {"reset"}, grants=(2,), transport="sent"),
    Setup("restart", ((0, 0), (1, 0)), _EVENTS | {"producer dies"}, grants=(1, 1)),
    Setup("restart, asked", ((0, 0), (1, 0)), _EVENTS | {"producer dies"}, grants=(1, 1), transport="asked"),
    Setup("one slot", ((0, 0), (0, 0)), _EVENTS | {"reset"}, one_slot=True),
    Setup("reset", ((0, 0), (0, 1)), _EVENTS | {"reset"}, grants=(2,)),
)


def broken(state: State) -> str:
    """The rule that this state breaks."""
    if state.wrong:
        return state.wrong
    for lease in state.producer.leases:
        if state.producer.blocks[lease.block].owner != lease.number:
            return "no block has two owners"
    for one in state.consumers:
        if one.alive and one.phase == DONE and one.life != NONE and one.using != NONE:
            return "a connection in the pool has no lease in use"
    return ""


def _holds_blocks(state: State) -> bool:
    return bool(state.producer.leases or state.producer.granting)


def _fetches(state: State) -> bool:
    return any(one.alive and one.phase != IDLE and not one.result for one in state.consumers)


PROMISES = (
    # Whatever its consumers do, and also if they stop or go on renewing.
    Promise("every lease ends, and its blocks go back", _holds_blocks, frozenset({"producer", "time"})),
    # Whatever the producer does, and also if it stops.
    Promise("every fetch ends", _fetches, frozenset({"consumer", "time"})),
)


def model(setup: Setup) -> Model[State]:
    return Model(
        name=setup.name,
        initial=initial(setup),
        actions=[one.bound(setup) for one in ACTIONS],
        broken=broken,
        may_rest=lambda state: not _holds_blocks(state) and not _fetches(state),
        show=show,
        promises=PROMISES,
    )


def show(state: State) -> list[str]:
    """Facts that differ from those at the start, one per line."""
    p = state.producer
    lines = [f"producer: life {p.life}{'' if p.alive else ', dead'}"]
    lines += [f"block {at}: owner {b.owner}, content {b.content}" for at, b in enumerate(p.blocks)]
    lines += [f"lease {lease.number}: {lease}" for lease in p.leases]
    lines += [f"board: {row}" for row in p.board if row]
    lines += [f"slot {at} names lease {named}" for at, named in enumerate(p.slots) if named != NONE]
    lines += [f"consumer {at}: {one}" for at, one in enumerate(state.consumers)]
    return lines
