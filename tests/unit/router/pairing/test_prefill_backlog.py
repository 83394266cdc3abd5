"""The estimated backlog of engines, by a clock that only a test moves."""

from __future__ import annotations

import random

import pytest

from disagg.router.pairing.prefill_backlog import PrefillBacklog, Speed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_estimate_is_0_before_the_first_measurement(clock: Clock) -> None:
    backlog = PrefillBacklog(Speed(), clock)
    backlog.begin(1000)
    assert backlog.left_s() == 0
    clock.now += 2
    backlog.finish(1000)
    backlog.begin(500)
    assert backlog.left_s() == pytest.approx(1)


def test_time_that_has_passed_is_not_counted(clock: Clock) -> None:
    speed = Speed()
    speed.learn(1000, 1.0)
    backlog = PrefillBacklog(speed, clock)
    backlog.begin(1000)
    backlog.begin(2000)
    assert backlog.left_s() == pytest.approx(3)
    clock.now += 0.75
    assert backlog.left_s() == pytest.approx(2.25)
    clock.now += 10
    assert backlog.left_s() == 0
    backlog.begin(100)
    assert backlog.left_s() == pytest.approx(0.1)


def test_prompts_are_computed_one_after_another(clock: Clock) -> None:
    """The time of the second prompt counts from the end of the first."""
    speed = Speed()
    backlog = PrefillBacklog(speed, clock)
    backlog.begin(1000)
    backlog.begin(1000)
    for _ in range(2):
        clock.now += 1
        backlog.finish(1000)
    assert speed.takes(1000) == pytest.approx(1)


def test_prompts_of_one_step_end_together(clock: Clock) -> None:
    speed = Speed()
    backlog = PrefillBacklog(speed, clock)
    for _ in range(4):
        backlog.begin(250)
    clock.now += 1
    for _ in range(4):
        backlog.finish(250)
    assert speed.takes(1000) == pytest.approx(1, rel=0.2)
    assert backlog.left_s() == 0


def test_a_prompt_that_finished_late_moves_the_end(clock: Clock) -> None:
    speed = Speed()
    speed.learn(1000, 1.0)
    backlog = PrefillBacklog(speed, clock)
    backlog.begin(1000)
    backlog.begin(1000)
    clock.now += 5
    assert backlog.left_s() == 0
    backlog.finish(1000)
    assert backlog.left_s() == pytest.approx(speed.takes(1000))
    assert 1 < backlog.left_s() < 5


def test_a_prompt_that_ends_unseen_never_lengthens_the_wait(clock: Clock) -> None:
    """An answer in one piece, or a failure: it gives no measurement, and the estimate stays."""
    speed = Speed()
    speed.learn(1000, 1.0)
    backlog = PrefillBacklog(speed, clock)
    backlog.begin(1000)
    backlog.begin(1000)
    clock.now += 1.5
    backlog.forget(1000)
    assert backlog.left_s() == pytest.approx(0.5)
    backlog.begin(1000)
    backlog.forget(1000)
    assert backlog.left_s() == pytest.approx(1)
    backlog.forget(1000)
    assert backlog.left_s() == 0
    assert speed.takes(1000) == 1


def test_speed_follows_the_last_measurements(clock: Clock) -> None:
    speed = Speed()
    speed.learn(1000, 1.0)
    for _ in range(50):
        speed.learn(1000, 0.1)
    assert speed.takes(1000) == pytest.approx(0.1, rel=0.1)


def test_prompts_of_all_lengths_are_estimated_well() -> None:
    """A prompt takes 50 ms and 0.1 ms for each token. A mean per token would say a fifth of that
    for 100 tokens."""
    speed, chance = Speed(), random.Random(1)
    for _ in range(100):
        tokens = chance.choice([100, 500, 2000, 8000])
        speed.learn(tokens, (0.05 + 0.0001 * tokens) * chance.uniform(0.9, 1.1))
    for tokens in (100, 500, 2000, 8000):
        assert speed.takes(tokens) == pytest.approx(0.05 + 0.0001 * tokens, rel=0.3)
    assert speed.takes(300, 3) == pytest.approx(3 * speed.takes(100))


@pytest.mark.parametrize("seed", range(20))
def test_prompts_of_one_length_tell_of_others_in_proportion(seed: int) -> None:
    """Their noise must not pass for a line that says something else of much longer ones."""
    speed, chance = Speed(), random.Random(seed)
    for _ in range(50):
        speed.learn(chance.randint(950, 1050), chance.uniform(0.8, 1.2))
    assert speed.takes(1000) == pytest.approx(1, rel=0.2)
    assert speed.takes(8000) == pytest.approx(8, rel=0.4)
    assert speed.takes(100) == pytest.approx(0.1, rel=1)


def test_long_prompts_that_take_more_of_each_token() -> None:
    """Attention: no line through them begins above 0."""
    speed = Speed()
    for _ in range(20):
        for tokens in (1000, 8000):
            speed.learn(tokens, tokens * tokens / 1e7)
    assert speed.prompt_s == 0
    assert 0 < speed.takes(1000) < speed.takes(8000)
