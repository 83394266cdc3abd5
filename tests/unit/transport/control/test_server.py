"""What the producer does with a lease at a consumer's word, and at nobody else's."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import pytest
from unit.transport.test_fetch import Pair, ask, channel, hello, pair, same

from disagg.errors import PeerLost
from disagg.transport import protocol as p
from disagg.transport.control.channel import Channel
from disagg.transport.control.lease import FETCHED
from disagg.transport.deadline import Deadline
from disagg.transport.fetch import LeaseName, renew

__all__ = ["pair"]

STREAM, PROMPT = b"s" * 16, b"p" * 16
AWAIT, FOLLOW = p.Await("life-1", STREAM, PROMPT, 0.0), p.Follow("life-1", STREAM, PROMPT)
FIRST = p.Fetch("shared_storage", p.Part(4, ((0, 1),)), b"")


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


# ---- leases that grow --------------------------------------------------------------------------


def grow(pair: Pair, lease: int = 0, stream: bytes = STREAM, blocks: int = 3) -> None:
    pair.leases.grow(lease, f"request-{lease}", stream, PROMPT, blocks)


def follow(pair: Pair, opened: Channel) -> p.Grown:
    answer = ask(opened, FOLLOW)
    assert isinstance(answer, p.Grown), answer
    return answer


def refused(answer: p.Answer) -> str:
    assert isinstance(answer, p.Failed), answer
    return answer.reason


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_stream_is_awaited_and_followed(pair: Pair) -> None:
    """News come at once: `ask` waits for five seconds."""
    pair.server._use_limit_s = 600
    opened = hello(pair)
    assert ask(opened, AWAIT) == p.Awaited(has_begun=False)
    assert refused(ask(opened, FOLLOW)) == "lease_gone"
    grow(pair)
    assert ask(opened, AWAIT) == p.Awaited(has_begun=True)
    assert pair.leases._leases[0].users == 0
    assert follow(pair, opened) == p.Grown(0, 0, 0, False)
    assert pair.leases._leases[0].users == 1
    assert refused(ask(opened, FIRST)) == "window", "it is not final yet"
    pair.leases.extend(0, 0, [(0, [5])], 4)
    assert ask(opened, p.Proceed(0, 0, 600.0)) == p.Grown(0, 0, 4, False)
    assert isinstance(ask(opened, FIRST), p.Fetched)
    assert len(pair.files()) == 1
    pair.grant(0, [5, 6, 7])
    assert ask(opened, p.Proceed(0, 4, 600.0)) == p.Grown(0, 0, 4, True)
    assert pair.files() == [], "its consumer has it"
    last = p.Fetch("shared_storage", p.Part(4, ((1, 3),)), b"")
    assert isinstance(ask(opened, last), p.Fetched)
    assert ask(opened, p.Release("life-1", 0, FETCHED)) == p.Done()
    assert [tuple(one) for one in pair.leases.take_ended()] == [("request-0", "fetched")]
    assert pair.files() == []
    opened.close()


def test_a_prompt_of_many_steps_has_many_fetches(pair: Pair) -> None:
    """At most 32 between two answers; the producer keeps files for no more."""
    opened = hello(pair)
    grow(pair)
    pair.leases.extend(0, 0, [(0, [5])], 4)
    follow(pair, opened)
    for _ in range(3):
        found = [ask(opened, FIRST) for _ in range(33)]
        assert [isinstance(one, p.Fetched) for one in found] == [True] * 32 + [False]
        assert isinstance(ask(opened, p.Proceed(0, 0, 0.0)), p.Grown)
    opened.close()


def test_a_stream_of_another_prompt_or_life_is_refused(pair: Pair) -> None:
    grow(pair)
    opened = hello(pair)
    for kind, reason in (
        (("life-1", STREAM, b"q" * 16), "prompt_mismatch"),
        (("life-0", STREAM, PROMPT), "lease_gone"),
    ):
        assert refused(ask(opened, p.Await(*kind, 600.0))) == reason
        assert refused(ask(opened, p.Follow(*kind))) == reason
    assert pair.leases._leases[0].users == 0
    opened.close()


def test_messages_out_of_order_change_no_lease_in_use(pair: Pair) -> None:
    """Proceed without Follow, or of a lease without a stream; Follow, Await or Acquire twice."""
    grow(pair)
    pair.grant(1, [6])
    grow(pair, 2, b"t" * 16)
    opened = hello(pair)
    assert refused(ask(opened, p.Proceed(0, 0, 600.0))) == "protocol"
    assert isinstance(ask(opened, p.Acquire("life-1", 1)), p.Acquired)
    assert refused(ask(opened, p.Proceed(0, 0, 600.0))) == "protocol"
    assert ask(opened, p.Release("life-1", 1, FETCHED)) == p.Done()
    follow(pair, opened)
    for again in (FOLLOW, p.Follow("life-1", b"t" * 16, PROMPT), AWAIT, p.Acquire("life-1", 0)):
        assert refused(ask(opened, again)) == "protocol"
    assert [pair.leases._leases[lease].users for lease in (0, 2)] == [1, 0]
    assert ask(opened, p.Proceed(1, 0, 600.0)) == p.Grown(0, 0, 0, False)
    opened.close()


def test_a_peer_without_a_cache_follows_nothing(pair: Pair) -> None:
    grow(pair)
    opened = channel(pair)
    assert isinstance(ask(opened, p.Hello(p.VERSION, "router", {})), p.Welcome)
    for message in (AWAIT, FOLLOW, p.Proceed(0, 0, 0.0)):
        assert refused(ask(opened, message)) == "protocol"
    assert pair.leases._leases[0].users == 0
    opened.close()


def test_a_request_that_ends_leaves_the_connection_to_others(pair: Pair) -> None:
    opened = hello(pair)
    grow(pair)
    pair.leases.extend(0, 0, [(0, [5])], 4)
    follow(pair, opened)
    assert isinstance(ask(opened, FIRST), p.Fetched)
    opened.send(p.encode(p.Proceed(0, 4, 600.0)), Deadline.after(5))
    pair.leases.stop(0)
    assert refused(p.decode_answer(opened.receive(Deadline.after(5)))) == "lease_gone"
    assert pair.files() == []
    pair.grant(1, [6])
    assert isinstance(ask(opened, p.Acquire("life-1", 1)), p.Acquired)
    assert ask(opened, p.Release("life-1", 1, FETCHED)) == p.Done()
    assert pair.leases._leases.keys() == {1}
    opened.close()


@pytest.mark.parametrize("whole", [False, True])
def test_who_leaves_while_it_follows_is_noticed(pair: Pair, whole: bool) -> None:
    """While it waits for news, too. The request that is computed goes on."""
    pair.server._use_limit_s = 600
    opened = hello(pair)
    grow(pair)
    follow(pair, opened)
    if whole:
        pair.grant(0, [5, 6, 7], seconds=600)
        assert ask(opened, p.Proceed(0, 0, 600.0)) == p.Grown(0, 0, 0, True)
    else:
        opened.send(p.encode(p.Proceed(0, 0, 600.0)), Deadline.after(5))
    opened.close()
    until(lambda: pair.leases._leases[0].users == 0)
    until(lambda: pair.server.connections() == 0)
    if not whole:
        pair.grant(0, [5, 6, 7], seconds=600)
    assert pair.leases.take_ended() == []
    pair.clock.later += 3
    # As of any lease in use: its consumer has two seconds to return.
    assert [one.outcome for one in pair.leases.take_ended()] == (["expired"] if whole else [])


def test_a_silent_follower_loses_the_lease(pair: Pair) -> None:
    """Each answer gives it two seconds."""
    opened = hello(pair)
    grow(pair)
    follow(pair, opened)
    until(lambda: pair.leases._leases[0].users == 0)
    assert pair.leases._leases.keys() == {0}


def test_a_lease_is_ended_or_renewed_by_its_stream(pair: Pair) -> None:
    opened = hello(pair)
    grow(pair)
    grow(pair, 1, b"t" * 16)
    for lease in (0, 1):
        pair.grant(lease, [5 + lease], seconds=30)
    for life, streams in (("life-0", [b"t" * 16]), ("life-1", [STREAM])):
        pair.clock.later += 10
        assert ask(opened, p.Renew(life, [], streams)) == p.Done()
    pair.clock.later += 11
    assert [one.request_id for one in pair.leases.take_ended()] == ["request-1"]
    for life in ("life-0", "life-1"):
        assert pair.leases.take_ended() == []
        assert ask(opened, p.Release(life, -1, "aborted", 1, STREAM)) == p.Done()
    assert [one.request_id for one in pair.leases.take_ended()] == ["request-0"]
    opened.close()


def test_names_of_streams_that_are_too_long_are_not_kept(pair: Pair) -> None:
    opened = hello(pair)
    for length, is_kept in ((64, True), (65, False), (60_000, False)):
        name = b"x" * length
        answer = ask(opened, p.Release("life-1", -1, "aborted", 1, name))
        assert (answer == p.Done()) == is_kept
        assert pair.leases.has_begun(name) == is_kept
    opened.close()


@pytest.mark.parametrize("seconds", [-1.0, -math.inf, math.nan, math.inf, 1e308])
def test_nobody_waits_for_longer_than_a_lease_is_used(pair: Pair, seconds: float) -> None:
    """`ask` waits for five seconds."""
    opened = hello(pair)
    grow(pair)
    pair.server._use_limit_s = 0.4
    await_other = p.Await("life-1", b"t" * 16, PROMPT, seconds)
    assert ask(opened, await_other) == p.Awaited(has_begun=False)
    pair.server._use_limit_s = 600
    follow(pair, opened)
    pair.server._use_limit_s = 0.4
    assert ask(opened, p.Proceed(0, 0, seconds)) == p.Grown(0, 0, 0, False)
    opened.close()


NUMBERS = (0, 1, 2, -1, 1 << 62, -(1 << 62), (1 << 64) - 1)
STREAMS = (STREAM, b"", b"t" * 16, b"\0" * 64, b"x" * 300)
LIVES, PROMPTS = ("life-1", "life-0", "", "\ud7ff" * 9), (PROMPT, b"", b"q" * 200)
SECONDS = (0.0, -1.0, -math.inf)


def odd_message(rng: random.Random) -> p.Request:
    choice = rng.choice
    spans = tuple((choice(NUMBERS), choice(NUMBERS)) for _ in range(rng.randrange(3)))
    life = choice((*LIVES[:1] * 6, *LIVES[1:]))
    name = (life, choice((*STREAMS[:1] * 4, *STREAMS[1:])), choice((*PROMPTS[:1] * 4, *PROMPTS)))
    outcome = choice((FETCHED, "aborted", "expired"))
    return choice(
        (
            p.Await(*name, choice(SECONDS)),
            p.Follow(*name),
            p.Follow(*name),
            p.Proceed(choice(NUMBERS), choice(NUMBERS), choice(SECONDS)),
            p.Proceed(choice(NUMBERS), choice(NUMBERS), choice(SECONDS)),
            p.Fetch("shared_storage", p.Part(4, choice((((0, 1),), spans))), b""),
            p.Release(life, choice((0, 7)), outcome, choice(NUMBERS)),
            p.Release(life, -1, choice((FETCHED, "")), 1, choice(STREAMS)),
            p.Renew(life, [choice(NUMBERS)], [choice(STREAMS)]),
        )
    )


def test_any_messages_in_any_order(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Each has its answer, no thread fails, and nothing stays in use."""
    pair.server._use_limit_s = 60
    numbers, seen = itertools.count(), set[type]()
    rng = random.Random(7)
    for _ in range(40):
        opened, lease = hello(pair), next(numbers)
        stream = STREAM if lease % 2 else b"t" * 16
        for turn in range(25):
            match turn:
                case 1:
                    grow(pair, lease, stream)
                case 6:
                    pair.leases.extend(lease, 0, [(0, [5])], 4)
                case 12:
                    pair.leases.begin_anew(lease, 1)
                case 16 if lease % 3:
                    pair.grant(lease, [5, 6, 7])
            seen.add(type(ask(opened, odd_message(rng))))
        pair.leases.stop(lease)
        opened.close()
        pair.leases._past.clear()  # or the stream could not begin again
        until(lambda: pair.server.connections() == 0)
        assert all(held.users == 0 for held in pair.leases._leases.values())
        pair.leases.revoke(lease + 1)
        pair.leases.take_ended()
        assert (len(pair.leases._leases), len(pair.leases._streams)) == (0, 0)
        assert pair.files() == []
    assert seen == {p.Awaited, p.Grown, p.Fetched, p.Done, p.Failed}
    assert [one for one in caplog.records if one.exc_info] == []
