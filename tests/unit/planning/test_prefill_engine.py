"""The simulated prefill engine against closed forms."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from unit.planning.loads import speeds

from disagg.planning.events import Clock
from disagg.planning.prefill_engine import PrefillEngine
from disagg.planning.speeds import Speeds


def prefilled(of: Speeds, requests: Sequence[tuple[float, int, int]]) -> list[float]:
    """When one prefill engine has computed each prompt."""
    return [done for _, done in times(of, requests)]


def times(of: Speeds, requests: Sequence[tuple[float, int, int]]) -> list[tuple[float, float]]:
    """When one prefill engine begins each prompt, and when it has computed it."""
    clock, begun, done = Clock(), dict[int, float](), dict[int, float]()
    prompts = [prompt for _, prompt, _ in requests]

    def begins(now: float, request: int) -> None:
        assert request not in begun, "told twice"
        begun[request] = now

    engine = PrefillEngine(
        of.prefill, prompts, clock, begins, lambda now, request: done.update({request: now})
    )
    for request, (at, _, _) in enumerate(requests):
        clock.at(at, engine.add, request)
    clock.run(float("inf"))
    return [(begun[request], done[request]) for request in range(len(requests))]


def test_a_prompt_alone_takes_its_steps_tokens_and_attention() -> None:
    speed = speeds().prefill
    (short,) = prefilled(speeds(), [(0.0, 800, 1)])
    assert short == pytest.approx(0.01 + 800e-4 + 1e-8 * 800 * 800 / 2)
    (long,) = prefilled(speeds(), [(0.0, 3500, 1)])  # in four steps of at most 1,000 tokens
    assert long == pytest.approx(4 * 0.01 + 3500e-4 + 1e-8 * 3500 * 3500 / 2)
    assert long == pytest.approx(speed.alone(3500) - speed.request_s)


def test_a_prompt_waits_for_the_steps_before_it() -> None:
    of = speeds({"token_context_s": 0.0})
    # In four steps of at most 1,000 tokens. The last one has room for the second prompt.
    whole = 4 * 0.01 + 3500e-4 + 300e-4
    (first, done), (second, _), (third, _) = times(of, [(1.0, 3500, 1), (1.1, 300, 1), (9.0, 5, 1)])
    assert first == 1.0
    assert done == pytest.approx(1.0 + whole)
    assert second == pytest.approx(1.0 + 3 * (0.01 + 1000e-4))
    assert third == 9.0


def test_prompts_share_steps_and_the_last_one_is_cut() -> None:
    of = speeds({"token_context_s": 0.0})
    # The first step starts at once with the first alone; then 400 + 400 + 200 of 400; then 200.
    done = prefilled(of, [(0.0, 100, 1), (0.001, 400, 1), (0.002, 400, 1), (0.003, 400, 1)])
    assert done == pytest.approx([0.02, 0.13, 0.13, 0.16])


def test_at_most_so_many_prompts_in_a_step() -> None:
    of = speeds({"token_context_s": 0.0, "max_num_seqs": 2})
    assert prefilled(of, [(0.0, 100, 1)] * 4) == pytest.approx([0.03, 0.03, 0.06, 0.06])


@pytest.mark.parametrize("busy", [0.5, 0.8])
def test_waits_are_those_of_m_d_1(busy: float) -> None:
    """One prompt a step, all of one length, Poisson: mean wait busy / (2 (1 - busy)) services."""
    of = speeds({"max_num_batched_tokens": 500, "token_context_s": 0.0})
    service = 0.01 + 500e-4
    draw, at, requests = random.Random(1), 0.0, []
    for _ in range(30_000):
        requests.append((at, 500, 1))
        at += draw.expovariate(busy / service)
    done = prefilled(of, requests)
    waits = [end - begin[0] - service for end, begin in zip(done, requests, strict=True)]
    mean = sum(waits) / len(waits)
    assert mean == pytest.approx(busy / (2 * (1 - busy)) * service, rel=0.05)
