"""When decode computes prompts that would wait for prefill."""

from __future__ import annotations

import random

from disagg.router.pairing.local_prefill import LocalPrefill
from disagg.router.pairing.tail_latency import TailLatency


def test_the_slowest_10_percent() -> None:
    latency, drawn = TailLatency(), random.Random(1)
    assert not latency.is_tail(1.0), "nothing is known yet"
    seconds = [drawn.random() for _ in range(2000)]
    slow = [one for one in seconds if latency.is_tail(one)]
    assert 0.07 < len(slow) / len(seconds) < 0.13
    assert min(slow[20:]) > 0.8
    assert {latency.is_tail(5.0) for _ in range(128)} == {True, False}, "until most are as slow"
    assert not latency.is_tail(5.0)


def after_typical_requests(share: float) -> LocalPrefill:
    """After requests that waited 1 s for prefill, and took 1 s to compute."""
    local_prefill = LocalPrefill(share)
    for _ in range(20):
        local_prefill.is_worth_it(1.0, 0.0, 1.0, 1)
    return local_prefill


def test_the_slowest_move_to_decode_first() -> None:
    """The slowest must save more than the share of the others' wait; the rest, four times that."""
    assert after_typical_requests(0.1).is_worth_it(1.5, 0.0, 1.0, 14), "one of the slowest"
    assert not after_typical_requests(0.1).is_worth_it(1.5, 0.0, 1.0, 16)
    assert after_typical_requests(0.1).is_worth_it(1.0, 0.0, 0.9, 2), "one of many"
    assert not after_typical_requests(0.1).is_worth_it(1.0, 0.0, 0.9, 3)


def test_none_moves_where_it_would_wait_longer() -> None:
    for share in (0.0, 0.1):
        local_prefill = after_typical_requests(share)
        assert not local_prefill.is_worth_it(3.0, 3.0, 1.0, 1)
        assert not local_prefill.is_worth_it(0.0, 0.0, 1.0, 1)
        assert not local_prefill.is_worth_it(3.0, 4.0, 0.0, 0)


def test_short_prompts_move_sooner() -> None:
    assert after_typical_requests(0.5).is_worth_it(2.0, 0.0, 0.3, 10)
    assert not after_typical_requests(0.5).is_worth_it(2.0, 0.0, 0.5, 10)
    assert after_typical_requests(0.5).is_worth_it(1.5, 0.0, 0.1, 7), "not one of the slowest"
