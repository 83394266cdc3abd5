"""All runs: the protocol as it is in every setup, and mutants, each in the setup that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spec.actions import Description
from spec.checker import Result, check
from spec.engines import actions as engine_actions
from spec.engines import model as engines
from spec.engines import state as engine_state
from spec.growing import model as growing
from spec.growing import state as growing_state
from spec.handoff import model as handoff
from spec.handoff import state as handoff_state

CONTENT = "a believed fetch holds its own prompt's content"
UNREAD = "no direct read overlaps a free, within the limit"
UNUSED = "no block is freed while a connection has its lease in use"
RESET = "after a reset nothing from before is believed"
ONCE = "a lease ends once"
OWN_LIFE = "a message ends leases of its own generation only"
ALL_READ = "a lease is fetched when all of its readers have read it"
NOT_ENDED = "an ended lease is never acquired"
POOLED = "a connection in the pool has no lease in use"
LEASE_ENDS = "every lease ends, and its blocks go back"
FETCH_ENDS = "every fetch ends"
ANSWERED = engines.PROMISES["answered"].name
LATE = engines.PROMISES["answered late"].name
PREFILLED = engines.PROMISES["prefilled"].name
NOT_TWICE = "no prompt is computed twice where no engine is stuck"
NOT_WHILE_READ = "no blocks are taken back while they are read"


@dataclass(frozen=True)
class Run:
    """One check. mutant: the rule that is missing. breaks: the rule that must then be broken; ""
    for the protocol as it is."""

    setup: str
    mutant: str
    breaks: str
    start: Callable[[], Result]

    def is_right(self, result: Result) -> bool:
        """Whether the protocol holds, or the mutant is caught by the rule that it has to break."""
        return result.problem == self.breaks


def _handoff(setup: handoff_state.Setup, mutant: str = "", breaks: str = "") -> Run:
    model = handoff.model(replace(setup, mutant=mutant))
    return Run(setup.name, mutant, breaks, lambda: check(model))


def _growing(setup: growing_state.Setup, mutant: str = "", breaks: str = "") -> Run:
    model = growing.model(replace(setup, mutant=mutant))
    return Run(setup.name, mutant, breaks, lambda: check(model))


def _engines(setup: engine_state.Setup, mutant: str = "", breaks: str = "") -> Run:
    model = engines.model(replace(setup, mutant=mutant))
    return Run(setup.name, mutant, breaks, lambda: check(model))


ACTIONS: tuple[Description, ...] = (
    *handoff_state.ACTIONS.written,
    *growing_state.ACTIONS.written,
    *engine_actions.ACTIONS.written,
)
PROTOCOL = (
    *map(_handoff, handoff.SETUPS),
    *map(_growing, growing.SETUPS),
    *map(_engines, engines.SETUPS),
)
MUTANTS = (
    _handoff(handoff.TWICE, "no second look at the row", CONTENT),
    _handoff(handoff.DIRECT, "blocks go back before the row is removed", UNREAD),
    _handoff(handoff.DIRECT, "hazard slots are not looked at", UNREAD),
    _handoff(handoff.DIRECT, "slots are looked at once", UNREAD),
    _handoff(handoff.DIRECT, "the slot is written after the look-up", UNREAD),
    _handoff(handoff.REUSED, "numbers are reused", CONTENT),
    _handoff(handoff.RESTART, "the board's token is not checked", CONTENT),
    _handoff(handoff.ASKED_RESTART, "acquire ignores the generation", CONTENT),
    _handoff(handoff.RESTART, "release ignores the generation", OWN_LIFE),
    _handoff(handoff.ASKED, "leases expire in use", UNUSED),
    _handoff(handoff.ASKED, "acquire takes ended leases", NOT_ENDED),
    _handoff(handoff.ASKED, "a renewal revives an ended lease", ONCE),
    _handoff(handoff.ASKED, "a read is believed without the producer's answer", CONTENT),
    _handoff(handoff.SENT, "a lease's use ends before the sender has left the cache", CONTENT),
    _handoff(handoff.ASKED, "a connection with a lease in use returns to the pool", POOLED),
    _handoff(handoff.READERS, "one reader of several ends the lease", ALL_READ),
    _handoff(handoff.DIRECT, "a reset ends no lease", RESET),
    _handoff(handoff.DIRECT, "a reset comes before the step's grants", RESET),
    _handoff(handoff.DIRECT, "an ended lease stays on the board", RESET),
    _handoff(handoff.DIRECT, "renewals have no limit", LEASE_ENDS),
    _handoff(handoff.DIRECT, "a renewal past the total life extends a direct read", LEASE_ENDS),
    _handoff(handoff.DIRECT, "direct reads have no limit", LEASE_ENDS),
    _handoff(handoff.ASKED, "the use of a lease has no limit", LEASE_ENDS),
    _handoff(handoff.ASKED, "a fetch has no deadline", FETCH_ENDS),
    _growing(growing.READ, "a new beginning is not noticed", CONTENT),
    _growing(
        growing.READ, "a new beginning leaves what was fetched before the last answer", CONTENT
    ),
    _growing(growing.SHARED, "what is final is believed before the lease is whole", CONTENT),
    _growing(growing.READ, "the last chunk is believed without the producer's answer", CONTENT),
    _growing(growing.SENT, "a step's own blocks are final", CONTENT),
    _growing(growing.SHARED, "the first step's blocks are final", CONTENT),
    _growing(growing.DEVICE, "growth does not wait for the device", CONTENT),
    _growing(growing.DEVICE, "stale growth counts", CONTENT),
    _growing(growing.DEVICE, "a new beginning waits for the device", CONTENT),
    _growing(growing.READ, "an aborted prompt's lease is not ended", LEASE_ENDS),
    _growing(growing.READ, "each answer about a whole lease prolongs its use", LEASE_ENDS),
    _growing(growing.READ, "a follower has no deadline", FETCH_ENDS),
    _engines(engines.SMALL, "no lease is taken back", ANSWERED),
    _engines(engines.SIZES, "one lease is taken back, and never another", ANSWERED),
    _engines(engines.SMALL, "leases are taken back for loads only", ANSWERED),
    _engines(engines.PARTLY, "leases are not taken back for loaded requests", ANSWERED),
    _engines(engines.SMALL, "leases that are read are taken back", NOT_WHILE_READ),
    _engines(engines.BUSY, "leases are taken back while a request runs", NOT_TWICE),
    _engines(engines.BUSY, "leases are taken back while a load is under way", NOT_TWICE),
    _engines(engines.LATE, "renewals have no limit", LATE),
    _engines(engines.STALLED, "renewals have no limit", PREFILLED),
)
RUNS = (*PROTOCOL, *MUTANTS)
