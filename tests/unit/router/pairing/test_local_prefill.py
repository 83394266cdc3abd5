"""When decode reads what would wait for prefill."""

from __future__ import annotations

import random

from disagg.router.pairing.local_prefill import LocalPrefill
from disagg.router.pairing.tail_latency import TailLatency


def test_the_slowest_tenth() -> None:
    slowest, drawn = TailLatency(), random.Random(1)
    assert not slowest.is_tail(1.0), "nothing is known yet"
    seconds = [drawn.random() for _ in range(2000)]
    slow = [one for one in seconds if slowest.is_tail(one)]
    assert 0.07 < len(slow) / len(seconds) < 0.13
    assert min(slow[20:]) > 0.8
    assert {slowest.is_tail(5.0) for _ in range(128)} == {True, False}, "until most are as slow"
    assert not slowest.is_tail(5.0)


def after_usual_ones(share: float) -> LocalPrefill:
    """Of who came before, most waited for a second, as long as they were read."""
    helping = LocalPrefill(share)
    for _ in range(20):
        helping.is_worth_it(1.0, 0.0, 1.0, 1)
    return helping


def test_who_would_wait_longest_is_helped_first() -> None:
    """By the share of what all who are there wait; the others by four times as much."""
    assert after_usual_ones(0.1).is_worth_it(1.5, 0.0, 1.0, 14), "one of the slowest"
    assert not after_usual_ones(0.1).is_worth_it(1.5, 0.0, 1.0, 16)
    assert after_usual_ones(0.1).is_worth_it(1.0, 0.0, 0.9, 2), "one of many"
    assert not after_usual_ones(0.1).is_worth_it(1.0, 0.0, 0.9, 3)


def test_nobody_goes_where_it_would_wait_longer() -> None:
    for share in (0.0, 0.1):
        helping = after_usual_ones(share)
        assert not helping.is_worth_it(3.0, 3.0, 1.0, 1)
        assert not helping.is_worth_it(0.0, 0.0, 1.0, 1)
        assert not helping.is_worth_it(3.0, 4.0, 0.0, 0)


def test_what_is_soon_read_is_helped_sooner() -> None:
    assert after_usual_ones(0.5).is_worth_it(2.0, 0.0, 0.3, 10)
    assert not after_usual_ones(0.5).is_worth_it(2.0, 0.0, 0.5, 10)
    assert after_usual_ones(0.5).is_worth_it(1.5, 0.0, 0.1, 7), "not one of the slowest"
