"""`bench speeds`: the arithmetic from samples to speeds. Engines are measured by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from disagg.bench.speeds import fit as speeds_fit
from disagg.bench.speeds import predicted
from disagg.bench.speeds import run as speeds
from disagg.bench.speeds.fit import MoveSample, PromptSample, StepSample
from disagg.errors import ConfigError, DisaggError
from disagg.planning import speeds as speeds_file

LENGTHS = (128, 512, 1000, 2000, 4000, 6000)


def prompt_s(tokens: int) -> float:
    return -(-tokens // 2048) * 0.02 + 2e-4 * tokens + 3e-8 * tokens * tokens / 2


def test_speeds_are_found_again() -> None:
    samples = [PromptSample(n, prompt_s(n), prompt_s(n) + 0.007) for n in LENGTHS]
    fit = speeds_fit.prompts(samples, 2048)
    assert fit.speeds == pytest.approx({"step_s": 0.02, "token_s": 2e-4, "token_context_s": 3e-8})
    assert fit.worst < 1e-9
    assert speeds_fit.overhead(samples) == pytest.approx(0.007)
    fixed = speeds_fit.prompts(samples, 2048, 0.02)
    assert fixed.speeds == pytest.approx({"token_s": 2e-4, "token_context_s": 3e-8})


def test_steps_and_handoffs_are_found_again_through_noise() -> None:
    draw = random.Random(0)

    def noisy(seconds: float) -> float:
        return seconds * draw.uniform(0.97, 1.03)

    shapes = [(b, b * c) for b in (1, 4, 8, 16) for c in (128, 1000, 4000)] * 3
    taken = [StepSample(b, c, noisy(0.03 + 0.002 * b + 4e-7 * c)) for b, c in shapes]
    steps = speeds_fit.steps(taken)
    expected = {"step_s": 0.03, "sequence_s": 0.002, "context_token_s": 4e-7}
    assert steps.speeds == pytest.approx(expected, rel=0.1)
    assert 0 < steps.typical < 0.03 < steps.worst + 0.02
    moves = [MoveSample(n, noisy(0.04 + 0.01 + 1e-5 * n)) for n in LENGTHS * 5]
    fit = speeds_fit.moves(moves, [0.04] * len(moves))
    assert fit.speeds == pytest.approx({"latency_s": 0.01, "token_s": 1e-5}, rel=0.2)


def test_no_speed_is_negative() -> None:
    samples = [PromptSample(n, 2e-4 * n - 0.005, 1.0) for n in LENGTHS]
    fit = speeds_fit.prompts(samples, 2048)
    assert min(fit.speeds.values()) == 0
    assert fit.worst > 0.01


def test_handoffs_that_take_no_time_are_no_speed() -> None:
    moves = [MoveSample(n, 0.05) for n in LENGTHS]
    with pytest.raises(DisaggError, match="--lengths"):
        speeds_fit.moves(moves, [0.04 + 1e-7 * n for n in LENGTHS])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefill": "http://a"}, "--decode: missing"),
        ({"lengths": [1, 2]}, "--lengths: "),
        ({"batches": [1, 100]}, "--batches: 100 — --max-num-seqs is 64"),
    ],
)
def test_a_wrong_plan_is_named(options: dict[str, object], said: str) -> None:
    good: dict[str, object] = {
        "lengths": LENGTHS,
        "batches": (1, 4),
        "contexts": (1, 2),
        "repeats": 1,
        "batched_tokens": 2048,
        "seqs": 64,
        "parallel": 8,
        "prefill": None,
        "decode": None,
        "note": "",
    }
    with pytest.raises(ConfigError, match=said):
        speeds.SpeedsPlan(**{**good, **options})  # type: ignore[arg-type]


def test_tables_of_the_results_file() -> None:
    known = speeds_file.load(Path(__file__).parents[4] / "examples/speeds-cpu.json")
    coefficients, fits = speeds._tables(known)
    by_name = {(row["part"], row["coefficient"]): row["value"] for row in coefficients.rows}
    assert by_name["decode", "step_s"] == known.decode.step_s
    assert by_name["router", "router_s"] == known.router_s
    assert {
        "fit": "prefill",
        "samples": 18,
        "error, median": "5.5%",
        "error, largest": "49.1%",
    } in (fits.rows)
    measured = {"ttft_p50": 0.1, "ttft_p99": 0.4, "itl_p50": 0.01, "itl_p99": None}
    said = {"ttft_p50": 0.08, "ttft_p99": 0.4, "itl_p50": 0.01, "itl_p99": 0.02}
    row = {"pairs": 2, "requests": 60, "measured": measured, "predicted": said}
    first, *_, last = predicted._shown(row)
    assert (first["engines"], first["error"]) == ("2P2D", "-20%")
    assert "error" not in last
