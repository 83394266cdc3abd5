"""Which requests ask a tier that may be slow, and for how long, by a clock of the test's."""

from __future__ import annotations

import pytest

from disagg.connector.offload.pace import SLACK_S, Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> Pace:
    """Computing takes 1 ms a token."""
    made = Pace("objects", clock)
    for _ in range(3):
        made.computed(1000, 1.0)
    return made


def test_a_request_waits_as_long_as_computing_takes(pace: Pace) -> None:
    assert Pace("x").limit_s(2000) == 2 + SLACK_S, "a guess, before anything is measured"
    assert pace.limit_s(2000) == 2 + SLACK_S
    pace.computed(1500, 0.6)
    assert pace.limit_s(2000) - SLACK_S == pytest.approx(0.8)
    pace.computed(8, 0.001)  # too few to tell
    assert pace.limit_s(2000) - SLACK_S == pytest.approx(0.8)


def test_a_moment_when_computing_was_slow_says_little(pace: Pace) -> None:
    """Else slow loads would be fast enough, and nothing would be computed that shows the truth."""
    for _ in range(7):
        pace.computed(1000, 5.0)
    assert pace.limit_s(1000) - SLACK_S == pytest.approx(1.0)
    pace.computed(1000, 4.0)
    assert pace.limit_s(1000) - SLACK_S == pytest.approx(4.0), "it is slower now"


def test_a_slow_model_is_believed_after_some_prompts() -> None:
    pace = Pace("x")
    for _ in range(2):
        pace.computed(1000, 8.0)
        assert pace.limit_s(1000) - SLACK_S == pytest.approx(1.0)
    pace.computed(1000, 8.0)
    assert pace.limit_s(1000) - SLACK_S == pytest.approx(8.0)


def test_what_is_left_of_loaded_prompts_says_nothing_of_whole_ones(pace: Pace) -> None:
    """80 tokens behind a load of 1,920 take 0.3 s, nearly all of it for the step itself."""
    for _ in range(20):
        pace.computed(80, 0.3)
    assert pace.limit_s(1920) - SLACK_S == pytest.approx(1.92)
    assert pace.limit_s(80) - SLACK_S == pytest.approx(0.3)


def test_after_a_late_load_one_request_tries_now_and_then(pace: Pace, clock: Clock) -> None:
    assert pace.asks("a")
    pace.late_load(10, 2.0)
    assert not pace.asks("a")
    for pause in (2, 4, 8, 16, 30, 30):
        clock.now += pause - 0.5
        assert not pace.asks("b")
        clock.now += 0.6
        assert pace.asks("b")
        assert pace.asks("b"), "as often as its lookup needs"
        assert not pace.asks("c")
        pace.late_load(10, 2.0)
    clock.now += 31
    assert pace.asks("d")
    pace.loaded(10, 0.1)
    assert pace.asks("e")
    assert pace.asks("f")


def test_three_late_lookups_in_a_row(pace: Pace, clock: Clock) -> None:
    for late in (True, True, False, True, True):
        pace.lookup_ended(late=late)
        assert pace.asks("a")
    pace.lookup_ended(late=True)
    assert not pace.asks("a")
    clock.now += 3
    assert pace.asks("b")
    pace.lookup_ended(late=False)
    assert pace.asks("a")


def test_a_lookup_in_time_does_not_make_loads_fast(pace: Pace, clock: Clock) -> None:
    pace.late_load(10, 2.0)
    clock.now += 3
    assert pace.asks("b")
    pace.lookup_ended(late=False)
    assert not pace.asks("c")


def test_loads_that_take_longer_than_computing_are_not_begun(pace: Pace, clock: Clock) -> None:
    """Reads of 0.5 s each, four at once: short prefixes are computed, long ones are loaded."""
    assert pace.pays("a", 1, 64), "nothing is measured yet"
    pace.read(0.5)
    pace.loaded(40, 5.0)
    clock.now += 1
    assert pace.pays("a", 1, 64), "it tries"
    assert not pace.pays("b", 1, 64)
    assert not pace.pays("b", 2, 128)
    assert pace.pays("b", 2, 256), "0.5 s against 0.256 s and the slack"
    assert pace.pays("b", 20, 2560)
    assert pace.asks("b"), "it is not slow for all"
    pace.loaded(40, 20.0)
    assert not pace.pays("b", 20, 1280)
    for _ in range(4):
        pace.loaded(40, 0.2)
    assert pace.pays("b", 20, 1280), "it got faster"


def test_the_log_says_it_once(pace: Pace, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        pace.late_load(10, 2.0)
    pace.loaded(10, 0.1)
    pace.loaded(10, 0.1)
    assert caplog.messages == [
        "the tier objects is slower than computing (a load of 10 chunks took more than 2.00 s): "
        "blocks are computed until it is faster",
        "the tier objects is fast enough again",
    ]
