"""What the producer does with a lease at a consumer's word, and at nobody else's."""

from __future__ import annotations

import time

import pytest
from unit.transport.test_fetch import Pair, ask, hello, pair, same

from disagg.errors import PeerLost
from disagg.transport import protocol as p
from disagg.transport.control.channel import Channel
from disagg.transport.control.lease import FETCHED
from disagg.transport.deadline import Deadline
from disagg.transport.fetch import LeaseName, renew

__all__ = ["pair"]


def test_the_first_of_two_readers_leaves_the_second_its_time(pair: Pair) -> None:
    """A give-back is not a loss, after which the lease would live for two seconds."""
    pair.grant(0, [5], seconds=30)
    pair.fetch(0, [1], readers=2)
    pair.clock.later += 25
    assert pair.leases.take_ended() == []
    pair.fetch(0, [2], readers=2)
    assert pair.leases.take_ended()[0].outcome == "fetched"


def test_a_lease_is_renewed_over_the_channel(pair: Pair) -> None:
    pair.grant(0, [5], seconds=30)
    pair.grant(1, [6], seconds=30)
    for _ in range(4):
        pair.clock.later += 20
        renew(pair.peers, pair.endpoint, LeaseName(0), Deadline.after(5))
    assert [ended.request_id for ended in pair.leases.take_ended()] == ["request-1"]
    pair.fetch(0, [1])
    assert same(pair, [5], [1])


def test_messages_for_another_life_change_no_lease(pair: Pair) -> None:
    """Lease numbers begin anew with each life."""
    pair.grant(0, [5], seconds=30)
    opened = hello(pair)
    assert ask(opened, p.Release("life-0", 0, FETCHED)) == p.Done()
    assert ask(opened, p.Release("life-0", 0, "aborted")) == p.Done()
    assert pair.leases.take_ended() == []
    pair.clock.later += 25
    assert ask(opened, p.Renew("life-0", [0])) == p.Done()
    pair.clock.later += 10
    assert pair.leases.take_ended()[0].outcome == "expired"
    opened.close()


def test_no_other_outcome_ends_a_lease(pair: Pair) -> None:
    pair.grant(0, [5])
    opened = hello(pair)
    for outcome in ("", "taken_back", "expired", "held"):
        refused = ask(opened, p.Release("life-1", 0, outcome))
        assert isinstance(refused, p.Failed)
        assert refused.reason == "protocol"
    assert pair.leases.take_ended() == []
    opened.close()


def test_a_connection_has_one_lease_in_use(pair: Pair) -> None:
    for lease in (0, 1):
        pair.grant(lease, [lease])
    opened = hello(pair)
    assert isinstance(ask(opened, p.Acquire("life-1", 0)), p.Acquired)
    refused = ask(opened, p.Acquire("life-1", 1))
    assert isinstance(refused, p.Failed)
    assert refused.reason == "protocol"
    # It may end the other one, and keeps its own.
    assert ask(opened, p.Release("life-1", 1, "aborted")) == p.Done()
    assert [ended.request_id for ended in pair.leases.take_ended()] == ["request-1"]
    assert pair.leases._leases[0].users == 1
    assert ask(opened, p.Release("life-1", 0, FETCHED)) == p.Done()
    assert pair.leases.take_ended()[0].outcome == "fetched"
    refused = ask(opened, p.Fetch("shared_storage", p.Part(4, ((0, 1),)), b""))
    assert isinstance(refused, p.Failed)
    opened.close()


def test_a_fetch_is_for_the_lease_that_the_connection_has(pair: Pair) -> None:
    """No more fetches, and no more spans, than a consumer of ours would want."""
    pair.grant(0, [5])
    opened = hello(pair)
    assert isinstance(ask(opened, p.Acquire("life-1", 0)), p.Acquired)
    spans = tuple((0, 0) for _ in range(1 + 256))
    for count, reason in ((len(spans), None), (len(spans) + 1, "range")):
        part = p.Part(4, (*spans, (0, 0))[:count])
        got = ask(opened, p.Fetch("shared_storage", part, b""))
        assert (got.message if isinstance(got, p.Failed) else "").endswith(" spans") == bool(reason)
    part = p.Part(4, ((0, 1),))
    answers = [ask(opened, p.Fetch("shared_storage", part, b"")) for _ in range(34)]
    refused = [answer for answer in answers if isinstance(answer, p.Failed)]
    assert 2 <= len(refused) <= 3
    assert {answer.reason for answer in refused} == {"protocol"}
    unknown = ask(opened, p.Fetch("pigeons", part, b""))
    assert isinstance(unknown, p.Failed)
    assert unknown.reason == "no_transport"
    opened.close()


def test_who_waits_for_a_lease_far_ahead_is_refused_at_once(pair: Pair) -> None:
    """`ask` waits for five seconds."""
    pair.server._use_limit_s = 600
    opened = hello(pair)
    refused = ask(opened, p.Acquire("life-1", 1 << 20))
    assert isinstance(refused, p.Failed)
    assert refused.reason == "lease_gone"
    opened.close()


def test_who_follows_a_whole_lease_does_not_use_it_for_ever(pair: Pair) -> None:
    """Its blocks go back, however often the peer asks how far it is."""
    pair.server._use_limit_s = 0.5
    pair.leases.grow(0, "request-0", b"stream", b"prompt", 1)
    opened = hello(pair)
    answer = ask(opened, p.Follow("life-1", b"stream", b"prompt"))
    assert answer == p.Grown(0, 0, 0, is_whole=False)
    pair.grant(0, [5])
    with pytest.raises(PeerLost):
        _ask_again_and_again(opened, seconds=10)
    opened.close()


def _ask_again_and_again(opened: Channel, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        assert ask(opened, p.Proceed(0, 0, 0.0)) == p.Grown(0, 0, 0, is_whole=True)
        time.sleep(0.01)
