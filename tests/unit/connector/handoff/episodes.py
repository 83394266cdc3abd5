"""Episodes of random handoffs: a deployment, clients and faults, all drawn from one seed.

Engines are whole but for the model (`modelless.py`): vLLM's scheduler and block pool, both halves
of the connector, control channel, leases and transports. Each answer, each loaded block, and what
is left at the end are checked. Threads take their own time, so a seed fixes what is tried, not the
order in which threads run.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unit.connector.handoff import faults
from unit.connector.handoff.episode_plan import EpisodePlan
from unit.connector.handoff.params import spoiled
from unit.connector.handoff.places import (
    SETTLE_S,
    Asked,
    Ledger,
    Life,
    Place,
    WrongError,
    wait_until,
)
from unit.connector.handoff.points import Points
from unit.connector.modelless import BLOCK, PREFILL, VOCABULARY, answer

from disagg.connector.handoff.kv_transfer_params import INVITATION, STREAM, TICKET
from disagg.errors import TransferError
from disagg.transport.control.ticket import Handoff, verify
from disagg.transport.deadline import Deadline
from disagg.transport.fetch import release_everywhere

SECRET = b"correct horse battery"

_CLOSE_S = 30.0
_TRACED, _KEPT = 60, 200
# Turns take a millisecond; on a machine that is too busy they take a second, and an engine may be
# halted for many of them.
_SETTLE_TURNS = 1000
_CALLS = 12  # of a thread's stack


@dataclass(frozen=True)
class Ticket:
    """A finished prefill, for whoever decodes it. life: of its engine."""

    prompt: list[int]
    params: dict[str, Any]
    life: Life


@dataclass
class Tally:
    """Outcomes of handoffs, and how often each event happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)

    @property
    def handoffs(self) -> int:
        """Those that came to an end; not those that were lost with an engine."""
        return self.outcomes.total() - self.outcomes["lost with an engine"]


def stacks() -> Iterator[str]:
    """Where each thread of this process is: a thread that waits for ever is a hang."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        calls = traceback.extract_stack(frame)[-_CALLS:]
        shown = " < ".join(f"{Path(c.filename).name}:{c.lineno} {c.name}" for c in reversed(calls))
        yield f"{names.get(ident, ident)}: {shown}"


class Episode:
    """One deployment from its start to its end. Raises `WrongError`, with the last events."""

    def __init__(self, plan: EpisodePlan, model: Path, storage: Path, points: Points) -> None:
        self.plan, self.points, self._storage = plan, points, storage
        self.random = random.Random(~plan.seed)
        self.tally = Tally()
        self.trace: deque[str] = deque(maxlen=_TRACED)
        self.tickets: list[Ticket] = []
        self.kept: list[Ticket] = []  # of all lives and weights, for clients who come late
        self._invitations: dict[Life, Any] = {}
        self._in_vain: list[tuple[Place, str]] = []
        self._followed: set[tuple[Life, str]] = set()
        self._before = _of_transfers()
        ledger = Ledger()
        self.places = [
            Place(number, engine, model, ledger) for number, engine in enumerate(plan.engines)
        ]
        self._prompts = [self._fresh_prompt() for _ in range(6)]
        self._turn = self._held_until = 0
        self._got_on, self._turn_then = time.monotonic(), 0

    # ---- from the start to the end -------------------------------------------------------------

    def run(self) -> Tally:
        """Play, settle, and end all engines."""
        self.points.begin(self.plan.seed, self.plan.holds, self.plan.fails, self.plan.spoils)
        try:
            try:
                while self.tally.outcomes.total() < self.plan.handoffs:
                    self._play_turn()
                self._settle()
            finally:
                self._end_engines()
            self._check_nothing_is_left_open()
        except BaseException as error:
            error.add_note("\n".join(["the last events:", *self.trace]))
            raise
        return self.tally

    def _end_engines(self) -> None:
        self.points.end()
        while self.places:
            place = self.places.pop()
            place.go_on()
            place.engine.close()

    def note(self, event: str) -> None:
        """Write an event into the trace."""
        self.trace.append(f"{self._turn}: {event}")

    def _play_turn(self) -> None:
        self._turn += 1
        seconds, turns = time.monotonic() - self._got_on, self._turn - self._turn_then
        if seconds > SETTLE_S and turns > _SETTLE_TURNS:
            left = "; ".join(self._left())
            error = WrongError(
                f"handoffs do not go on for {seconds:.0f} s and {turns} turns: {left}"
            )
            error.add_note("\n".join(["where each thread is:", *stacks()]))
            raise error
        events = list(EVENTS)
        rates = [rate * (self.plan.wild if is_fault else 1) for rate, is_fault in EVENTS.values()]
        for event in self.random.choices(events, rates, k=2):
            self.tally.events[event.__name__] += 1
            event(self)
        ran = [self._step(place) for place in self.random.sample(self.places, len(self.places))]
        self.points.let_go(0.3)
        if self._turn == self._held_until:
            self.points.holds = self.plan.holds
        if any(ran):
            self._got_on, self._turn_then = time.monotonic(), self._turn
        else:
            self._wait()

    def _wait(self, *, quick: bool = False) -> None:
        """Nothing runs: the threads of loads want the interpreter, and patience its time. Leases
        that nobody fetches run out where nothing else makes room: engines that also decode take
        theirs back."""
        time.sleep(0.001)
        for place in self.places:
            place.patience.ahead += 0.1
            if not place.plan.consumes:
                place.clock.ahead += 0.5 if quick else 0.02

    def _step(self, place: Place) -> bool:
        """One step, and what it has ended. Whether it got on."""
        if place.halted:
            place.halted -= 1
            if not place.halted:
                place.go_on()
            return False
        place.step()
        finished = place.engine.finished
        got_on = bool(finished) or bool(place.engine.known)
        for name in list(finished):
            reason = finished.pop(name)
            if name in place.prefilling:
                self._end_prefill(place, name, reason)
            elif name in place.decoding:
                self._end_decode(place, name, reason)
            place.engine.answers.pop(name, None)
        return got_on

    def _end_prefill(self, place: Place, name: str, reason: str) -> None:
        prompt = place.prefilling.pop(name)
        if place.fetching.pop(name, None) is not None:
            outcome = place.outcome.pop(name, "not loaded")
            self.tally.events[f"fetched: {outcome}"] += 1
            if reason == "error":
                if not place.plan.strict or outcome == "loaded":
                    raise WrongError(f"{place}: {name} ended in an error, its load in: {outcome}")
                return
        has_states = any(group.state for group in place.plan.groups)
        computed = prompt[:-1] if has_states and len(prompt) > 1 else prompt
        self._check_answer(place, name, Asked(computed, 1, None, place.weights))
        params = place.engine.params.pop(name, None)
        if params is not None:  # None: a prompt of one token beside states
            ticket = Ticket(prompt, params, place.life)
            if (place.life, name) not in self._followed or self.random.random() < 0.1:
                self.tickets.append(ticket)
            self.kept = [*self.kept[-_KEPT:], ticket]
            self._invitations[place.life] = params[INVITATION]

    def _end_decode(self, place: Place, name: str, reason: str) -> None:
        asked, outcome = place.decoding.pop(name), place.outcome.pop(name, "not loaded")
        if outcome == "internal":
            raise WrongError(f"{place}: the load of {name} met an error that nobody expects")
        if reason == "error":
            if not place.plan.strict or outcome == "loaded":
                raise WrongError(f"{place}: {name} ended in an error, its load in: {outcome}")
            outcome = "refused: " + outcome
        else:
            self._check_answer(place, name, asked)
            if outcome not in ("loaded", "not loaded"):
                outcome = "computed: " + outcome
        self.tally.outcomes[outcome] += 1
        if asked.is_followed:
            self.tally.events[f"followed: {outcome}"] += 1
        self.note(f"{place} answers {name}: {outcome}")

    def _check_answer(self, place: Place, name: str, asked: Asked) -> None:
        due = answer(asked.prompt, asked.count, place.plan.groups, asked.weights)
        if place.engine.answers[name] != due:
            raise WrongError(
                f"{place}: {name} was answered {place.engine.answers[name]}, not {due}"
            )

    # ---- the end -------------------------------------------------------------------------------

    def _settle(self) -> None:
        """All requests are answered, then all leases end; nothing is left of any."""
        self.points.end()
        while self._in_vain:
            self.client_waits_in_vain()
        for place in self.places:
            place.go_on()
        self._step_until(self._all_answered, "requests that nobody answers")
        self.tickets.clear()
        for place in self.places:
            place.clock.ahead += 3600
        self._step_until(self._nothing_left, "left behind")
        for place in self.places:
            if not place.engine.scheduler.reset_prefix_cache():
                raise WrongError(f"{place}: its block pool is not whole")

    def _step_until(self, true: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not true():
            self.points.let_go(0.3)
            ran = [self._step(place) for place in self.places]
            if not any(ran):
                self._wait(quick=True)
            if time.monotonic() > deadline:
                raise WrongError(f"{problem}: {'; '.join(self._left())}")

    def _all_answered(self) -> bool:
        return not any(place.prefilling or place.decoding for place in self.places)

    def _nothing_left(self) -> bool:
        return next(self._left(), None) is None

    def _left(self) -> Iterator[str]:
        for place in self.places:
            yield from place.left()

    def _check_nothing_is_left_open(self) -> None:
        """Engines have ended: so have their threads, sockets and files."""
        if not wait_until(lambda: not self._open_now("thread"), _CLOSE_S):
            raise WrongError(f"left after the engines' end: {self._open_now('thread')}")
        gc.collect()  # mapped memory ends with its objects
        if not wait_until(lambda: not self._open_now(), _CLOSE_S):
            left, ends = self._open_now(), list(_ends())
            raise WrongError(f"left after the engines' end: {left}; all sockets: {ends}")

    def _open_now(self, kind: str = "") -> list[str]:
        opened = (name for name in _of_transfers() - self._before if name.startswith(kind))
        return [*opened, *(entry.name for entry in self._storage.iterdir() if not kind)]

    # ---- what clients do -----------------------------------------------------------------------

    def _fresh_prompt(self) -> list[int]:
        length = self.random.choice(
            (
                self.random.randrange(1, self.plan.longest + 1),
                self.random.randrange(1, 1 + self.plan.longest // BLOCK) * BLOCK,
                self.random.randrange(1, 2 * BLOCK),
            )
        )
        return self.random.choices(range(VOCABULARY), k=length)

    def _prompt(self) -> list[int]:
        """A fresh one, a known one, or one that begins as a known one does."""
        kind = self.random.random()
        if kind < 0.6:
            return self._fresh_prompt()
        known = self.random.choice(self._prompts)
        if kind < 0.8:
            return known
        begin = known[: self.random.randrange(1, len(known) + 1)]
        return (begin + self._fresh_prompt())[: self.plan.longest]

    def _under_way(self) -> int:
        return sum(len(place.prefilling) + len(place.decoding) for place in self.places)

    def _some(self, true: Callable[[Place], bool]) -> Place | None:
        fitting = [place for place in self.places if true(place)]
        return self.random.choice(fitting) if fitting else None

    def prefill(self) -> None:
        """Several clients at once, sometimes."""
        place = self._some(lambda place: place.plan.produces)
        assert place is not None
        for _ in range(self.random.choice((1, 1, 2, 4))):
            if self._under_way() < self.plan.at_once and len(self.tickets) < self.plan.at_once:
                self._prefill(place)

    def _prefill(self, place: Place) -> None:
        prompt = self._prompt()
        place.prefilling[place.engine.add(prompt, 1, PREFILL)] = prompt

    def prefill_from_a_neighbour(self) -> None:
        """A prompt that goes on behind a ticket's, at an engine that fetches what that one holds;
        others refuse the ticket, and compute. Decode may be asked at once."""
        place = self._some(lambda place: place.plan.produces)
        assert place is not None
        if not self.tickets or self._under_way() >= self.plan.at_once:
            return
        ticket = self.tickets.pop(self.random.randrange(len(self.tickets)))
        prompt = [*ticket.prompt, *self._fresh_prompt()][: self.plan.longest]
        params = {**PREFILL, "do_remote_prefill": True, TICKET: ticket.params[TICKET]}
        stream = ""
        if self.random.random() < 0.3 and place.life in self._invitations:
            stream = f"{self.random.getrandbits(128):032x}"
            params[STREAM] = stream
        name = place.engine.add(prompt, 1, params)
        handoff = _handoff(ticket.params)
        place.prefilling[name] = prompt
        place.fetching[name] = Asked(prompt, 1, handoff, place.weights, ticket.life)
        assert handoff is not None
        self.note(f"{place} computes {name}, {len(prompt)} tokens, with lease {handoff.lease}")
        if stream:
            self._followed.add((place.life, name))
            self._follow(place.life, prompt, stream, begins=True)

    def decode(self) -> None:
        """The usual: one request for one ticket; or several (n > 1)."""
        # Not limited by `at_once`: leases that nobody fetches would stop the prefills.
        if self.tickets:
            ticket = self.tickets.pop(self.random.randrange(len(self.tickets)))
            place = self._decoder()
            for _ in range(self.random.choice((1, 1, 1, 1, 1, 1, 1, 3))):
                self._ask(place, ticket.prompt, ticket.params, "decodes", ticket.life)

    def decode_and_keep_the_ticket(self) -> None:
        if self.tickets and self._under_way() < self.plan.at_once:
            ticket = self.random.choice(self.tickets)
            self._ask_for(ticket, ticket.prompt, ticket.params, "decodes, not for the last time")

    def late_clients_come(self) -> None:
        """With tickets of an engine's earlier life, whose numbers are leases of this life, too."""
        place = self._some(lambda place: place.lives > 1 and bool(place.leases()))
        if place is None:
            return
        numbers = place.leases()
        for ticket in [one for one in self.kept if one.life[0] == place.number]:
            handoff = _handoff(ticket.params)
            assert handoff is not None
            if ticket.life != place.life and handoff.lease in numbers:
                self._ask_for(ticket, ticket.prompt, ticket.params, "decodes for a late client")

    def decode_another_prompt(self) -> None:
        """Another one, or one that goes on behind the ticket's."""
        if self.tickets and self._under_way() < self.plan.at_once:
            ticket = self.random.choice(self.tickets)
            longer = [*ticket.prompt, *self._fresh_prompt()][: self.plan.longest]
            prompt = self.random.choice((self._prompt(), longer))
            self._ask_for(ticket, prompt, ticket.params, "decodes another prompt")

    def decode_with_spoiled_params(self) -> None:
        if self.tickets and self._under_way() < self.plan.at_once:
            ticket = self.random.choice(self.tickets)
            how, params = spoiled(ticket.params, SECRET, self.random)
            self._ask_for(ticket, ticket.prompt, params, f"decodes, {how}")
            self.tally.events[f"params: {how}"] += 1

    def follow(self) -> None:
        """Both legs at once, sometimes one of them later, or never, or for another prompt."""
        place = self._some(lambda place: place.plan.produces)
        assert place is not None
        lives = [life for life in self._invitations if life[0] == place.number]
        if not lives or self._under_way() >= self.plan.at_once:
            return
        stream, prompt = f"{self.random.getrandbits(128):032x}", self._prompt()
        wild = min(self.plan.wild, 1.0)
        life = self.random.choice(lives) if self.random.random() < 0.05 * wild else lives[-1]
        decodes = self._prompt() if self.random.random() < 0.05 * wild else prompt
        legs: list[Callable[[], None]] = []
        begins = self.random.random() > 0.02 * wild
        if begins:
            legs.append(lambda: self._begin_followed(place, prompt, stream))
        if self.random.random() > 0.05 * wild or not begins:
            legs.append(lambda: self._follow(life, decodes, stream, begins))
        self.random.shuffle(legs)
        for leg in legs:
            leg()
            if self.random.random() < 0.2:
                self._step(place)

    def _begin_followed(self, place: Place, prompt: list[int], stream: str) -> None:
        name = place.engine.add(prompt, 1, {**PREFILL, STREAM: stream})
        place.prefilling[name] = prompt
        self._followed.add((place.life, name))
        self.note(f"{place} computes {name}, {len(prompt)} tokens, stream {stream[:8]}")

    def _follow(self, life: Life, prompt: list[int], stream: str, begins: bool) -> None:
        invited = self._invitations[life]
        params = {"do_remote_prefill": True, INVITATION: invited, STREAM: stream}
        place = self._decoder()
        tokens = len(prompt) - any(group.state for group in place.plan.groups)
        lease = Handoff("", -1, [], [], max(1, tokens), BLOCK, b"")
        for _ in range(self.random.choice((1, 1, 1, 1, 1, 1, 1, 2))):
            name = self._ask(place, prompt, params, f"follows stream {stream[:8]}", life, lease)
            if not begins:
                self._in_vain.append((place, name))

    def client_waits_in_vain(self) -> None:
        """For a prefill that was never sent; the router has told decode by closing its leg."""
        if self._in_vain:
            place, name = self._in_vain.pop()
            if name in place.decoding:
                self._leave(place, name)

    def compute(self) -> None:
        """A request without a handoff takes blocks."""
        if self._under_way() < self.plan.at_once:
            place = self.random.choice(self.places)
            self._ask(place, self._prompt(), None, "computes")

    def _decoder(self) -> Place:
        # Now and then an engine that only prefills: it refuses the handoff.
        place = self._some(lambda place: place.plan.consumes or self.random.random() < 0.02)
        assert place is not None
        return place

    def _ask_for(self, ticket: Ticket, prompt: list[int], params: Any, how: str) -> None:
        self._ask(self._decoder(), prompt, params, how, ticket.life)

    def _ask(
        self,
        place: Place,
        prompt: list[int],
        params: Any,
        how: str,
        life: Life | None = None,
        handoff: Handoff | None = None,
    ) -> str:
        count = self.random.choice((1, 1, 1, 2, 40 if len(prompt) + 40 < self.plan.longest else 3))
        handoff = handoff or _handoff(params)
        name = place.engine.add(prompt, count, params)
        place.decoding[name] = Asked(prompt, count, handoff, place.weights, life)
        lease = "" if handoff is None else f", lease {handoff.lease}"
        self.note(f"{place} {how}: {name}, {len(prompt)} tokens{lease}")
        return name

    def client_leaves(self) -> None:
        place = self._some(lambda place: bool(place.decoding))
        if place is not None:
            self._leave(place, self.random.choice(list(place.decoding)))

    def _leave(self, place: Place, name: str) -> None:
        del place.decoding[name]
        place.outcome.pop(name, None)
        place.engine.abort(name)
        self.tally.outcomes["cancelled"] += 1
        self.note(f"{place}: the client of {name} leaves")

    def client_of_a_prefill_leaves(self) -> None:
        place = self._some(lambda place: bool(place.prefilling))
        if place is not None:
            name = self.random.choice(list(place.prefilling))
            del place.prefilling[name]
            place.fetching.pop(name, None)
            place.outcome.pop(name, None)
            place.engine.abort(name)
            self.note(f"{place}: the client of {name} leaves")

    def router_releases(self) -> None:
        """As the router does where no decode engine gets the request."""
        if not self.tickets or any(place.hangs for place in self.places) or self.points.held:
            return
        ticket = self.tickets.pop(self.random.randrange(len(self.tickets)))
        handoff = _handoff(ticket.params)
        assert handoff is not None
        self.note(f"the router releases lease {handoff.lease} of {ticket.life}")
        with contextlib.suppress(TransferError):
            release_everywhere(handoff, SECRET, Deadline.after(1))


EVENTS: dict[Callable[[Episode], None], tuple[float, bool]] = {
    Episode.prefill: (14, False),
    Episode.prefill_from_a_neighbour: (3, False),
    Episode.decode: (14, False),
    Episode.follow: (10, False),
    Episode.compute: (0.5, False),
    Episode.decode_and_keep_the_ticket: (0.7, True),
    Episode.decode_another_prompt: (0.7, True),
    Episode.decode_with_spoiled_params: (0.7, True),
    Episode.late_clients_come: (0.3, True),
    Episode.client_waits_in_vain: (1.0, True),
    Episode.client_leaves: (1.0, True),
    Episode.client_of_a_prefill_leaves: (0.3, True),
    Episode.router_releases: (0.2, True),
    faults.engine_restarts: (0.04, True),
    faults.engine_is_reset: (0.2, True),
    faults.all_get_new_weights: (0.03, True),
    faults.connections_are_cut: (0.3, True),
    faults.consumer_cuts: (0.1, True),
    faults.engine_halts: (0.2, True),
    faults.producer_hangs: (0.2, True),
    faults.time_passes: (0.5, True),
    faults.leases_end_amid_copies: (0.5, True),
    faults.clients_leave_amid_copies: (0.3, True),
    faults.threads_are_held: (0.1, True),
}
"""What may happen: how often, and whether `wild` makes it more or less frequent."""


def _handoff(params: Any) -> Handoff | None:
    """The handoff of whole params."""
    if isinstance(params, dict) and "disagg" in params:
        with contextlib.suppress(TransferError):
            return verify(params["disagg"], SECRET)
    return None


def _of_transfers() -> set[str]:
    """This process's threads of transfers, sockets and memory files, each told from later ones."""
    found = {
        f"thread {thread.name} {thread.ident}"
        for thread in threading.enumerate()
        if thread.name.startswith("disagg")
    }
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith("socket:") or "disagg" in target:
                found.add(f"{os.fstat(int(number)).st_ino} {target}")
    return found


def _ends() -> Iterator[str]:
    """The sockets of this process with their ends, for whoever looks for what is left."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as sock:
            ends = [str(sock.getsockname())]
            with contextlib.suppress(OSError):
                ends.append(str(sock.getpeername()))
            yield f"{os.fstat(int(number)).st_ino}: {' to '.join(ends)}"
