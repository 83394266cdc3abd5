"""The runs of this model: their bounds, and the rules that are checked."""

from __future__ import annotations

from spec.checker import Model, Promise

# They register their actions.
from spec.handoff import asked, connections, direct, messages, producer  # noqa: F401
from spec.handoff.state import ACTIONS, DONE, IDLE, NONE, Setup, State, initial

_FEW = frozenset({"renew", "cut"})
_MORE = _FEW | {"consumer dies", "cancel", "copy fails"}
_ALL = _MORE | {"reset", "take back", "producer dies"}

DIRECT = Setup("one fetch, direct", ((0, 0),), _ALL)
ASKED = Setup("one fetch, asked", ((0, 0),), _ALL, transport="asked")
SENT = Setup("one fetch, sent", ((0, 0),), _ALL, transport="sent")
TWICE = Setup("a ticket used twice", ((0, 0), (0, 0)), _FEW | {"consumer dies"})
READERS = Setup("two readers of a lease", ((0, 0), (0, 0)), _FEW | {"copy fails"}, readers=2)
REUSED = Setup("two leases, one block", ((0, 0), (0, 1)), _FEW, grants=(2,))
ROWS = Setup(
    "two leases, two blocks, one row",
    ((0, 0), (0, 1)),
    frozenset({"cut"}),
    grants=(2,),
    blocks=2,
    rows=1,
)
SLOT = Setup("two consumers, one slot", ((0, 0), (0, 0)), _FEW, one_slot=True)
RESET = Setup(
    "a reset between two leases", ((0, 0), (0, 1)), frozenset({"cut", "reset"}), grants=(2,)
)
ASKED_RESET = Setup(
    "a reset between two leases, asked",
    ((0, 0), (0, 1)),
    _MORE | {"reset"},
    grants=(2,),
    transport="asked",
)
RESTART = Setup("a restart", ((0, 0), (1, 0)), _FEW | {"cancel", "producer dies"}, grants=(1, 1))
ASKED_RESTART = Setup(
    "a restart, asked",
    ((0, 0), (1, 0)),
    _MORE | {"producer dies"},
    grants=(1, 1),
    transport="asked",
)
SETUPS = (
    DIRECT,
    ASKED,
    SENT,
    TWICE,
    READERS,
    REUSED,
    ROWS,
    SLOT,
    RESET,
    ASKED_RESET,
    RESTART,
    ASKED_RESTART,
)


def _holds_blocks(state: State) -> bool:
    return bool(state.producer.leases or state.producer.granting)


def _fetches(state: State) -> bool:
    return any(one.alive and one.phase != IDLE and not one.result for one in state.consumers)


PROMISES = (
    # Whatever its consumers do: also if they stop, or renew again and again.
    Promise(
        "every lease ends, and its blocks go back", _holds_blocks, frozenset({"producer", "time"})
    ),
    # Whatever the producer does: also if it stops.
    Promise("every fetch ends", _fetches, frozenset({"consumer", "time"})),
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


def model(setup: Setup) -> Model[State]:
    return Model(
        name=setup.name,
        initial=initial(setup),
        actions=ACTIONS.bound(setup),
        broken=broken,
        may_rest=lambda state: not _holds_blocks(state) and not _fetches(state),
        show=show,
        promises=PROMISES,
    )


def show(state: State) -> list[str]:
    """One line per fact."""
    p = state.producer
    lines = [f"producer: life {p.life}{'' if p.alive else ', dead'}"]
    if p.reset:
        lines.append(
            f"reset: {('asked', 'succeeded')[p.reset - 1]}, leases below {p.revoked} ended"
        )
    for at, block in enumerate(p.blocks):
        owner = "free" if block.owner == NONE else f"of lease {block.owner}"
        content = (
            "another request"
            if block.content[0] == NONE
            else "life {}, lease {}".format(*block.content)
        )
        lines.append(f"block {at}: {owner}, content of {content}")
    lines += [
        f"granted, not kept yet: lease {number}, block {block}" for number, block in p.granting
    ]
    for lease in p.leases:
        facts = [f"block {lease.block}", lease.outcome]
        facts += ["deadline passed"] * lease.passed + ["total life passed"] * lease.old
        facts += [("", "kept for its reader", "read for too long")[lease.kept]]
        lines.append(f"lease {lease.number}: {', '.join(filter(None, facts))}")
    lines += [f"board: lease {row.number}, block {row.block}" for row in p.board if row]
    lines += [f"slot {at} names lease {named}" for at, named in enumerate(p.slots) if named != NONE]
    for at, one in enumerate(state.consumers):
        facts = ["" if one.alive else "dead", one.phase, one.result]
        facts += [f"connected to life {one.life}"] * (one.life != NONE)
        facts += ["but cut"] * (one.life != NONE and not one.session)
        facts += [f"uses lease {one.using}"] * (one.using != NONE)
        facts += [f"has read {one.seen}"] * bool(one.seen)
        lines.append(f"consumer {at}: {', '.join(filter(None, facts))}")
    return lines
