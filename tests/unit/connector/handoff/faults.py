"""Faults that an episode of random handoffs may meet, each at a real boundary."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from unit.connector.handoff.places import SETTLE_S, WrongError

from disagg.transport.control.listener import Listener

if TYPE_CHECKING:
    from unit.connector.handoff.episodes import Episode


def engine_restarts(episode: Episode) -> None:
    place = episode.random.choice(episode.places)
    episode.note(f"{place} restarts")
    episode.tally.outcomes["lost with an engine"] += len(place.decoding)
    episode.points.let_go(1.0)
    place.restart(same_port=episode.random.random() < 0.7)


def engine_is_reset(episode: Episode) -> None:
    """As after a weight update. It says no while blocks are in use."""
    place = episode.random.choice(episode.places)
    episode.note(f"{place} is reset")
    place.engine.scheduler.reset_prefix_cache(reset_connector=True)


def all_get_new_weights(episode: Episode) -> None:
    """No request runs meanwhile, and all engines are reset until they agree. Tickets from
    before stay with the clients."""
    episode.note("all engines get new weights")
    episode.points.let_go(1.0)
    while episode._in_vain:
        episode.client_waits_in_vain()
    for place in episode.places:
        place.go_on()
    episode._step_until(episode._all_answered, "requests that nobody answers")
    deadline = time.monotonic() + SETTLE_S
    while not _all_are_reset(episode):
        for place in episode.places:
            episode._step(place)
        episode.points.let_go(1.0)
        if time.monotonic() > deadline:
            raise WrongError(f"not reset: {'; '.join(episode._left())}")
    weights = episode.random.getrandbits(64)
    for place in episode.places:
        place.new_weights(weights)


def _all_are_reset(episode: Episode) -> bool:
    schedulers = [place.engine.scheduler for place in episode.places]
    done = [one.reset_prefix_cache(reset_connector=True) for one in schedulers]
    return all(done)


def connections_are_cut(episode: Episode) -> None:
    """Some of those that a producer's worker serves, in the middle of whatever they do."""
    place = episode._some(lambda place: place.producer is not None)
    assert place is not None
    episode.note(f"{place}: connections are cut")
    producer = place.producer
    senders = [getattr(sender, "_listener", None) for sender in producer._senders]
    for listener in (producer._server._listener, *filter(None, senders)):
        _cut(episode, listener, 0.5)


def _cut(episode: Episode, listener: Listener, share: float) -> None:
    with listener._lock:
        for channel in list(listener._connections.values()):
            if episode.random.random() < share:
                channel.cut()


def consumer_cuts(episode: Episode) -> None:
    """Its idle connections, as a firewall does that forgets them."""
    place = episode.random.choice(episode.places)
    episode.note(f"{place}: idle connections are cut")
    peers = place.consumer._peers
    with peers._lock:
        for idle in peers._idle.values():
            for connection in idle:
                connection.channel.cut()


def engine_halts(episode: Episode) -> None:
    """It takes no step for some turns, as in a long one; its threads go on."""
    place = episode.random.choice(episode.places)
    if not place.halted:
        place.halted = episode.random.randrange(1, 15)
        episode.note(f"{place} takes no step for {place.halted} turns")


def producer_hangs(episode: Episode) -> None:
    """It takes no step, and serves no lease."""
    place = episode._some(lambda place: place.plan.produces and not place.halted)
    if place is not None:
        place.hang()
        place.halted = episode.random.randrange(1, 10)
        episode.note(f"{place} hangs for {place.halted} turns")


def time_passes(episode: Episode) -> None:
    """On one engine's clocks."""
    place = episode.random.choice(episode.places)
    seconds = episode.random.choice((0.1, 1.0, 3.0, 16.0, 30.0, 700.0))
    episode.note(f"{place}: {seconds} s pass")
    place.clock.ahead += seconds
    place.patience.ahead += min(seconds, 3.0)


def leases_end_amid_copies(episode: Episode) -> None:
    """And their blocks are used again. A reader that shows itself is waited for, up to a limit
    that begins when its lease has ended, and ends too."""
    place = episode._some(lambda place: place.plan.produces and not place.halted)
    if place is None or not episode.points.held:
        return
    episode.note(f"{place}: leases end amid copies")
    if episode.random.random() < 0.5:
        # The consumer goes on with its data connection.
        _cut(episode, place.producer._server._listener, 1.0)
        time.sleep(0.003)
    for _ in range(episode.random.choice((1, 2, 2))):
        place.clock.ahead += 700
        episode._step(place)
    for _ in range(3):
        episode._prefill(place)
    for _ in range(3):
        episode._step(place)


def clients_leave_amid_copies(episode: Episode) -> None:
    """And the blocks of those who stay are allocated."""
    place = episode._some(lambda place: bool(place.begun) and not place.halted)
    if place is None or not episode.points.held:
        return
    for name in [name for name in place.begun if name in place.decoding]:
        episode._leave(place, name)
    episode._step(place)
    for _ in range(3):
        episode._ask(place, episode._fresh_prompt(), None, "computes")
    for _ in range(3):
        episode._step(place)


def threads_are_held(episode: Episode) -> None:
    """For some turns, more threads than usual wait at a point."""
    episode.points.holds, episode._held_until = 0.5, episode._turn + 20
