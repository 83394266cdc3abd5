"""The whole simulation: choices, short prompts, seeds, targets, size."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict

import pytest
from unit.planning.loads import load, speeds

from disagg.planning.outcome import Gaps, Targets
from disagg.planning.simulation import Routing, _Run, meets, simulate
from disagg.planning.trace import synthetic

MIXED = synthetic("requests=2000,prompt=900,output=60,sigma=0.9", 20.0, 3)


def test_one_seed_gives_one_result() -> None:
    assert simulate(load(MIXED), 4, 3) == simulate(load(MIXED), 4, 3)
    other = simulate(load(MIXED, seed=1), 4, 3)
    assert other.ttft_p99 != simulate(load(MIXED), 4, 3).ttft_p99


def test_short_prompts_stay_with_decode() -> None:
    requests = [(float(n), 100, 5) for n in range(20)]
    assert simulate(load(requests, local_prefill_tokens=100), 1, 1).prefill_busy == 0
    assert simulate(load(requests, local_prefill_tokens=99), 1, 1).prefill_busy > 0


def test_a_request_that_fits_into_no_cache_is_refused_and_misses() -> None:
    requests = [(0.0, 100, 5), (0.1, 20_000, 1)]
    outcome = simulate(load(requests), 1, 1)
    assert (outcome.refused, outcome.missed, outcome.share) == (1, 1, 0.5)
    assert outcome.ttft_p99 < 1


def test_the_less_loaded_of_two_is_better_than_chance() -> None:
    """Of two engines both are drawn, so a request never queues while the other is free."""
    of = speeds(decode={"kv_tokens": 10**6, "max_num_seqs": 1000})
    requests = [(0.0, 1000, 1), (0.001, 1000, 1), (10.0, 1000, 1), (10.001, 1000, 1)]
    alone = simulate(load(requests[:1], of), 1, 1).ttft_p99
    assert simulate(load(requests, of), 2, 2).ttft_p99 == pytest.approx(alone)
    assert simulate(load(requests, of), 1, 2).ttft_p99 > alone + 0.1


@pytest.mark.parametrize(("prefill", "decode"), [(4, 3), (8, 8), (12, 6), (20, 20)])
def test_ending_early_gives_the_same_result(prefill: int, decode: int) -> None:
    asked = load(MIXED, targets=Targets(0.3, 0.05, 0.9))
    outcome = simulate(asked, prefill, decode)
    assert meets(asked, prefill, decode) == outcome.meets(asked.targets)
    assert outcome.missed <= outcome.late_first + outcome.slow_next
    assert outcome.missed >= max(outcome.late_first, outcome.slow_next)


def test_both_answers_occur() -> None:
    asked = load(MIXED, targets=Targets(0.3, 0.05, 0.9))
    assert not meets(asked, 4, 3)
    assert meets(asked, 20, 20)


def test_misses_allowed_are_not_lost_to_rounding() -> None:
    assert Targets(1, 1, 0.9).misses_allowed(30) == 3
    assert Targets(1, 1, 0.99).misses_allowed(100) == 1
    assert Targets(1, 1, 1.0).misses_allowed(1000) == 0


def test_quantiles_of_gaps_are_weighted() -> None:
    gaps = Gaps()
    gaps.add(0.1, 0.1, 90)
    gaps.add(0.2, 0.4, 10)
    assert gaps.quantile(0.5) == pytest.approx(0.1, rel=1e-6)
    assert gaps.quantile(0.95) == pytest.approx(0.3, rel=1e-6)
    assert Gaps().quantile(0.5) != Gaps().quantile(0.5)  # NaN


def test_utilisation_is_of_the_time_in_which_requests_come() -> None:
    of = speeds({"token_context_s": 0.0})
    outcome = simulate(load([(0.1 * n, 400, 1) for n in range(101)], of), 2, 1)
    assert outcome.prefill_busy == pytest.approx(100 * 0.05 / 10 / 2, rel=0.01)


def test_thousands_of_engines_in_seconds() -> None:
    many = synthetic("requests=8000,prompt=900,output=300,sigma=0.8", 8_000.0, 0)
    of = speeds({"step_s": 0.002}, {"kv_tokens": 10**6, "max_num_seqs": 256})
    began = time.process_time()
    outcome = simulate(load(many, of), 1200, 1200)
    assert time.process_time() - began < 6
    assert 0 < outcome.prefill_busy < 1
    assert outcome.ttft_p50 < 1


def test_streams_begin_with_prefills_token() -> None:
    """One request alone: its first token comes exactly with prefill's answer, then one gap."""
    of, requests = speeds(), [(0.0, 900, 5)]
    begun = simulate(load(requests, of, routing=Routing(0, first_token="prefill")), 1, 1)
    assert begun.ttft_p50 == pytest.approx(of.router_s + of.prefill.alone(900))
    handed = simulate(load(requests, of), 1, 1)
    gap = of.handoff.takes(901) + of.decode.request_s + of.decode.step(1, 901)
    assert begun.itl_p99 == pytest.approx(gap, rel=0.01)
    assert begun.itl_p50 == pytest.approx(handed.itl_p50, rel=0.01)
    last = [outcome.ttft_p50 for outcome in (begun, handed)]
    assert last[1] - last[0] == pytest.approx(gap, rel=0.01), "the second comes when the first did"


@pytest.mark.parametrize("hold_s", [0.01, 10.0])
def test_the_first_token_is_held_no_longer_than_for_the_second(hold_s: float) -> None:
    of, requests = speeds(), [(0.0, 900, 5)]
    begun = of.router_s + of.prefill.alone(900)
    routing = Routing(0, None, "prefill", hold_s)
    outcome = simulate(load(requests, of, routing=routing), 1, 1)
    gap = of.handoff.takes(901) + of.decode.request_s + of.decode.step(1, 901)
    assert outcome.ttft_p50 == pytest.approx(begun + min(hold_s, gap))
    assert load(requests, of, routing=routing).first_token_alone(0) == pytest.approx(
        outcome.ttft_p50, rel=1e-4
    )


def test_an_answer_of_one_token_is_decodes() -> None:
    requests = [(0.0, 900, 1)]
    begun = simulate(load(requests, routing=Routing(0, first_token="prefill")), 1, 1)
    assert begun.ttft_p50 == simulate(load(requests), 1, 1).ttft_p50


def test_decode_helps_when_prefill_is_behind() -> None:
    """The router's rule: decode computes part of a burst, and less with a higher threshold."""
    burst = [(20.0 * (n // 8) + 0.01 * (n % 8), 900, 8) for n in range(80)]
    busy = {
        share: simulate(load(burst, routing=Routing(0, prefill_wait_share=share)), 1, 1)
        for share in (0.0, 0.5, 100.0)
    }
    alone = simulate(load(burst), 1, 1)
    assert busy[100.0] == alone
    assert busy[0.0].prefill_busy < busy[0.5].prefill_busy < alone.prefill_busy
    assert busy[0.5].ttft_p99 < alone.ttft_p99


def test_decode_does_not_help_before_prefills_speed_is_known() -> None:
    at_once = [(0.0, 900, 8)] * 4
    routing = Routing(0, prefill_wait_share=0.0)
    assert simulate(load(at_once, routing=routing), 1, 1) == simulate(load(at_once), 1, 1)


def test_a_request_alone_takes_what_its_parts_take() -> None:
    of = speeds()
    outcome = simulate(load([(0.0, 3500, 40)], of), 1, 1)
    prefill = 0.004 + 4 * 0.01 + 3500e-4 + 1e-8 * 3500 * 3500 / 2
    handoff = 0.005 + 3500 * 1000 / 1e8
    step = 0.02 + 0.001 + 1e-6 * 3500
    assert outcome.ttft_p50 == pytest.approx(0.001 + prefill + 0.003 + handoff + step)
    assert outcome.ttft_p50 == pytest.approx(of.first_token_alone(3500, local=False))
    assert outcome.parts is not None
    assert asdict(outcome.parts) == pytest.approx(
        {
            "router": 0.001 + 0.004 + 0.003,
            "prefill_queue": 0.0,
            "prefill": prefill - 0.004,
            "decode_queue": 0.0,
            "handoff": handoff,
            "decode_step": step,
        }
    )
    local = simulate(load([(0.0, 3500, 40)], of), 0, 1)
    assert local.ttft_p50 == pytest.approx(
        0.001 + 0.003 + 4 * 0.02 + 3500 * 2e-4 + 2e-8 * 3500 * 3500 / 2
    )
    assert local.ttft_p50 == pytest.approx(of.first_token_alone(3500, local=True))
    assert local.parts is None


def test_the_parts_of_a_first_token_add_up_and_show_queues() -> None:
    """Under load: the queues' parts grow, and the sum is the mean time to the first token."""
    asked = load(MIXED, local_prefill_tokens=0)
    parts = {}
    for prefill, decode in ((20, 20), (4, 20), (20, 3)):
        run = _Run(asked, prefill, decode, misses=len(MIXED))
        run.serve()
        outcome = run.outcome()
        assert outcome.parts is not None
        parts[prefill, decode] = outcome.parts
        ttft = [first - came for first, came in zip(run._first, MIXED.at, strict=True)]
        assert sum(asdict(outcome.parts).values()) == pytest.approx(statistics.mean(ttft))
    roomy, few_prefill, few_decode = parts.values()
    assert few_prefill.prefill_queue > 5 * roomy.prefill_queue
    assert few_decode.decode_queue > roomy.decode_queue
    assert few_prefill.handoff == pytest.approx(roomy.handoff)
