"""How long engines have to read, by a clock that stands until it is moved."""

from __future__ import annotations

import pytest

from disagg.router.pairing.prefill_backlog import PrefillBacklog, Speed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_takes_time_before_a_prompt_was_read(clock: Clock) -> None:
    reading = PrefillBacklog(Speed(), clock)
    reading.begin(1000)
    assert reading.left_s() == 0
    clock.now += 2
    reading.finish(1000)
    reading.begin(500)
    assert reading.left_s() == pytest.approx(1)


def test_what_was_read_already_is_not_counted(clock: Clock) -> None:
    speed = Speed()
    speed.learn(1000, 1.0)
    reading = PrefillBacklog(speed, clock)
    reading.begin(1000)
    reading.begin(2000)
    assert reading.left_s() == pytest.approx(3)
    clock.now += 0.75
    assert reading.left_s() == pytest.approx(2.25)
    clock.now += 10
    assert reading.left_s() == 0
    reading.begin(100)
    assert reading.left_s() == pytest.approx(0.1)


def test_prompts_take_their_turns(clock: Clock) -> None:
    """The second one's time is from the first one's end."""
    speed = Speed()
    reading = PrefillBacklog(speed, clock)
    reading.begin(1000)
    reading.begin(1000)
    for _ in range(2):
        clock.now += 1
        reading.finish(1000)
    assert speed.takes(1000) == pytest.approx(1)


def test_prompts_of_one_step_end_together(clock: Clock) -> None:
    speed = Speed()
    reading = PrefillBacklog(speed, clock)
    for _ in range(4):
        reading.begin(250)
    clock.now += 1
    for _ in range(4):
        reading.finish(250)
    assert speed.takes(1000) == pytest.approx(1, rel=0.2)
    assert reading.left_s() == 0


def test_who_finished_late_has_the_rest_before_it(clock: Clock) -> None:
    speed = Speed()
    speed.learn(1000, 1.0)
    reading = PrefillBacklog(speed, clock)
    reading.begin(1000)
    reading.begin(1000)
    clock.now += 5
    assert reading.left_s() == 0
    reading.finish(1000)
    assert reading.left_s() == pytest.approx(speed.takes(1000))
    assert 1 < reading.left_s() < 5


def test_what_ends_unseen_makes_the_wait_no_longer(clock: Clock) -> None:
    """An answer in one piece, or one that failed: nothing is learnt, and the estimate stands."""
    speed = Speed()
    speed.learn(1000, 1.0)
    reading = PrefillBacklog(speed, clock)
    reading.begin(1000)
    reading.begin(1000)
    clock.now += 1.5
    reading.forget(1000)
    assert reading.left_s() == pytest.approx(0.5)
    reading.begin(1000)
    reading.forget(1000)
    assert reading.left_s() == pytest.approx(1)
    reading.forget(1000)
    assert reading.left_s() == 0
    assert speed.takes(1000) == 1


def test_speed_follows_what_was_read_lately(clock: Clock) -> None:
    speed = Speed()
    speed.learn(1000, 1.0)
    for _ in range(50):
        speed.learn(1000, 0.1)
    assert speed.takes(1000) == pytest.approx(0.1, rel=0.1)
