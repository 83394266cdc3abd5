"""The search compared with trying all pairs, and targets that no number of engines meets."""

from __future__ import annotations

import itertools

import pytest
from unit.planning.loads import load, speeds

from disagg.planning.outcome import Targets
from disagg.planning.search import Costs, Unreachable, search
from disagg.planning.simulation import meets
from disagg.planning.trace import Trace, synthetic

MIXED = synthetic("requests=300,prompt=900,output=40,sigma=0.7", 20.0, 2)
TARGETS = Targets(0.5, 0.04, 0.9)


@pytest.mark.parametrize("costs", [Costs(1, 1), Costs(1, 3), Costs(4, 1)])
def test_nothing_cheaper_meets_the_targets(costs: Costs) -> None:
    asked = load(MIXED, targets=TARGETS)
    best = search(asked, costs).best
    assert best.meets(TARGETS)
    cheapest = costs.of(best.prefill, best.decode)
    pairs = itertools.product(range(1, best.prefill + 4), range(1, best.decode + 4))
    cheaper = [pair for pair in pairs if costs.of(*pair) < cheapest]
    assert cheaper
    assert not any(meets(asked, *pair) for pair in cheaper)


def test_costs_move_the_ratio() -> None:
    """A pair at the boundary: other pairs have as many engines, or one more."""
    asked = load(MIXED, targets=Targets(0.5, 0.03, 0.9))
    dear_decode = search(asked, Costs(1, 10)).best
    dear_prefill = search(asked, Costs(10, 1)).best
    assert dear_decode.decode <= dear_prefill.decode
    assert dear_prefill.prefill <= dear_decode.prefill


def test_candidates_are_the_choice_and_its_neighbours() -> None:
    asked = load(MIXED, targets=TARGETS)
    choice = search(asked, Costs(1, 1))
    found = {(row.prefill, row.decode): row.meets(TARGETS) for row in choice.candidates}
    at = (choice.best.prefill, choice.best.decode)
    assert found[at]
    assert found[at[0] + 1, at[1]]
    assert not found[at[0] - 1, at[1]]
    assert choice.together is not None
    assert choice.together.meets(TARGETS)
    assert not meets(asked, 0, choice.together.decode - 1)


def test_a_prompt_that_takes_too_long_alone_is_named() -> None:
    requests = [(0.1 * n, 3500 if n < 5 else 100, 10) for n in range(20)]
    with pytest.raises(Unreachable) as caught:
        search(load(requests, targets=Targets(0.3, 1, 0.8)), Costs(1, 1))
    why = str(caught.value)
    assert "5 of 20 requests miss them" in why
    assert "a prompt of 3,500 tokens" in why
    assert search(load(requests, targets=Targets(0.3, 1, 0.75)), Costs(1, 1)).best.missed == 5


def test_steps_that_take_too_long_alone_are_named() -> None:
    with pytest.raises(Unreachable, match=r"more than --itl 0.02 s between tokens"):
        search(load([(0.0, 100, 10)], targets=Targets(1, 0.02, 0.9)), Costs(1, 1))


def test_caches_too_small_are_named() -> None:
    asked = load([(0.0, 900, 200)], speeds(decode={"kv_tokens": 1000}), targets=TARGETS)
    with pytest.raises(Unreachable, match=r"KV cache of 1,000 tokens; the smallest has 1,100"):
        search(asked, Costs(1, 1))


def test_too_many_at_one_moment() -> None:
    """Even one engine per request is not enough if two requests get the same engine."""
    at_once = Trace([0.0] * 40, [900] * 40, [2] * 40, "made up")
    alone = speeds().first_token_alone(900, local=False)
    with pytest.raises(Unreachable, match=r"not even 40 engines of each role"):
        search(load(at_once, targets=Targets(alone + 1e-6, 1, 1.0)), Costs(1, 1))
