"""Which connections serve another handoff."""

from __future__ import annotations

import contextlib
import time

import pytest
from unit.transport.test_fetch import Pair, pair

from disagg.errors import LeaseGone
from disagg.transport import protocol as p
from disagg.transport.control.lease import FETCHED
from disagg.transport.deadline import Deadline

__all__ = ["pair"]


def test_a_connection_with_a_lease_in_use_is_not_pooled(pair: Pair) -> None:
    """Closing it tells the producer; the next handoff on it would be refused."""
    pair.grant(0, [5], seconds=30)
    fails = contextlib.suppress(ZeroDivisionError)
    with fails, pair.peers.connection(pair.endpoint, Deadline.after(5)) as connection:
        connection.ask(p.Acquire("life-1", 0), p.Acquired, Deadline.after(5))
        _ = 1 // 0
    assert connection.in_use
    deadline = time.monotonic() + 5
    while pair.server.connections() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert pair.server.connections() == 0
    assert pair.leases._leases[0].users == 0
    pair.clock.later += 3
    assert pair.leases.take_ended()[0].outcome == "expired", "who left has two seconds to return"


def test_a_connection_that_was_answered_is_pooled(pair: Pair) -> None:
    """Whatever the answers were."""
    pair.grant(0, [5])
    for _ in range(3):
        with pair.peers.connection(pair.endpoint, Deadline.after(5)) as connection:
            with pytest.raises(LeaseGone):
                connection.ask(p.Acquire("life-0", 0), p.Acquired, Deadline.after(5))
            connection.ask(p.Acquire("life-1", 0), p.Acquired, Deadline.after(5))
            connection.ask(p.Release("life-1", 0, FETCHED), p.Done, Deadline.after(5))
        pair.leases.take_ended()
        pair.grant(0, [5])
    assert pair.server.connections() == 1


def test_a_connection_in_use_while_the_pool_closes_is_closed_after(pair: Pair) -> None:
    with pair.peers.connection(pair.endpoint, Deadline.after(5)) as connection:
        pair.peers.close()
        with pytest.raises(LeaseGone):
            connection.ask(p.Acquire("life-0", 0), p.Acquired, Deadline.after(5))
        assert connection.settled
    assert connection.channel._sock.fileno() == -1


def test_so_many_idle_connections_are_kept(pair: Pair) -> None:
    deadline = Deadline.after(10)
    with contextlib.ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(pair.peers.connection(pair.endpoint, deadline))
        assert pair.server.connections() == 20
    until = time.monotonic() + 5
    while pair.server.connections() > 16 and time.monotonic() < until:
        time.sleep(0.005)
    assert pair.server.connections() == 16
