"""Which engines get requests after failures and missed probes, by a clock of the test's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from disagg.router.engines.health import Health
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint

BAD, GOOD = BOTH = [
    EngineEndpoint(f"decode-{n}", "decode", f"http://127.0.0.1:{n}") for n in (1, 2)
]
DEAF = "does not answer /health"


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(RouterMetrics(), clock)


def times(count: int, call: Callable[[], object]) -> None:
    for _ in range(count):
        call()


def share(health: Health) -> float:
    """How often BAD is among the engines to choose from."""
    seen = Counter(engine for _ in range(2000) for engine in health.usable(BOTH))
    assert seen[GOOD] == 2000
    return seen[BAD] / 2000


def test_an_engine_that_keeps_failing_rests_and_is_tried_by_one(
    health: Health, clock: Clock
) -> None:
    times(2, lambda: health.failed(BAD))
    assert health.usable(BOTH) == BOTH
    health.failed(BAD)
    assert health.usable(BOTH) == [GOOD]
    assert health.usable([BAD]) == []
    assert health.problem(BAD) == "3 requests in a row failed"
    clock.now += 0.4
    assert health.usable(BOTH) == [GOOD]
    clock.now += 0.1
    assert health.usable(BOTH) == BOTH
    health.trying(GOOD)
    assert health.usable(BOTH) == BOTH
    health.trying(BAD)
    assert health.usable(BOTH) == [GOOD], "one trial at a time"
    health.answered(BAD, 200)
    assert health.problem(BAD) is None
    assert 0.05 < share(health) < 0.2, "who comes back gets little at first"
    assert health.usable([BAD]) == [BAD], "unless there is nobody else"


def test_each_rest_is_twice_as_long_up_to_half_a_minute(health: Health, clock: Clock) -> None:
    times(3, lambda: health.failed(BAD))
    for rest in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        clock.now += rest - 0.1
        assert health.usable(BOTH) == [GOOD]
        clock.now += 0.1
        assert health.usable(BOTH) == BOTH
        health.failed(BAD)
    times(2000, lambda: health.failed(BAD))
    clock.now += 30.0
    assert health.usable(BOTH) == BOTH


@pytest.mark.parametrize(("status", "fails"), [(502, 1), (503, 1), (504, 1), (500, 0), (400, -1)])
def test_what_an_answer_says_of_its_engine(health: Health, status: int, fails: int) -> None:
    """500 may be the request's fault, and is no sign of health either."""
    times(2, lambda: health.failed(BAD))
    health.answered(BAD, status)
    assert health.usable(BOTH) == ([GOOD] if fails > 0 else BOTH)
    health.failed(BAD)
    assert health.usable(BOTH) == (BOTH if fails < 0 else [GOOD])


def test_probes_take_an_engine_out_and_bring_it_back(health: Health) -> None:
    health.probed(BAD, DEAF)
    assert health.usable(BOTH) == BOTH, "once may be chance"
    assert health.problem(BAD) == DEAF
    health.probed(BAD, DEAF)
    assert health.usable(BOTH) == [GOOD]
    health.probed(BAD, None)
    assert health.problem(BAD) is None
    assert health.usable([BAD]) == [BAD]
    assert 0.05 < share(health) < 0.2
    health.probed(BAD, DEAF)
    assert health.usable([BAD]) == [BAD], "missed probes are counted anew"


def test_a_probe_that_is_answered_ends_the_rest(health: Health, clock: Clock) -> None:
    """The engine was down, not only failing."""
    times(5, lambda: health.failed(BAD))
    health.probed(BAD, None)
    assert health.usable([BAD]) == [], "it was not down: its requests fail for another reason"
    times(2, lambda: health.probed(BAD, DEAF))
    health.probed(BAD, None)
    assert health.usable([BAD]) == [BAD]


def test_one_missed_probe_makes_an_engine_suspect(health: Health) -> None:
    assert not health.is_suspect(BAD)
    health.probed(BAD, DEAF)
    assert health.is_suspect(BAD)
    health.probed(BAD, DEAF)
    assert not health.is_suspect(BAD), "it counts as down"
    health.probed(BAD, None)
    assert not health.is_suspect(BAD)


def test_who_was_away_gets_its_whole_share_again(health: Health, clock: Clock) -> None:
    for _ in range(3):
        health.failed(BOTH[0])
        health.probed(BOTH[1], DEAF)
    clock.now += 60
    health.answered(BOTH[0], 200)
    health.probed(BOTH[1], None)
    assert {len(health.usable(BOTH)) for _ in range(100)} >= {1, 2}
    clock.now += 10
    assert all(len(health.usable(BOTH)) == 2 for _ in range(100))
    times(3, lambda: health.failed(BOTH[0]))
    assert list(health.usable(BOTH)) == [BOTH[1]], "and is looked at as before"


def test_the_share_grows_with_the_time(health: Health, clock: Clock) -> None:
    times(3, lambda: health.failed(BAD))
    health.answered(BAD, 200)
    for expected in (0.1, 0.55, 1.0):
        assert abs(share(health) - expected) < 0.06
        clock.now += 5


def test_an_engine_that_is_warm_may_still_fail(health: Health, clock: Clock) -> None:
    """The end of its warm-up does not end its trials."""
    times(3, lambda: health.failed(BAD))
    times(2, lambda: health.probed(BAD, DEAF))
    health.probed(BAD, None)
    clock.now += 10
    assert health.usable(BOTH) == BOTH
    health.trying(BAD)
    assert health.usable(BOTH) == [GOOD]


@pytest.mark.parametrize("also", ["fails", "is down", "comes back", None])
def test_who_is_put_in_service_may_have_other_problems(
    health: Health, clock: Clock, also: str | None
) -> None:
    health.withhold(BAD, "its weights are being loaded")
    assert health.usable(BOTH) == [GOOD]
    assert health.problem(BAD) == "its weights are being loaded"
    if also == "fails":
        times(3, lambda: health.failed(BAD))
    elif also is not None:
        times(2, lambda: health.probed(BAD, DEAF))
        if also == "comes back":
            health.probed(BAD, None)
    health.put_in_service(BAD)
    if also is None:
        assert health.usable(BOTH) == BOTH
    elif also == "comes back":
        assert 0.05 < share(health) < 0.2
    else:
        assert health.usable(BOTH) == [GOOD]


def test_another_engine_of_the_same_name_starts_clean(health: Health) -> None:
    times(3, lambda: health.failed(BAD))
    health.forget(BAD)
    assert health.usable(BOTH) == BOTH
    health.failed(BAD)
    assert health.usable(BOTH) == BOTH
    health.put_in_service(BAD)
    assert health.problem(BAD) is None


def test_handoffs_that_fail_are_a_problem_of_the_engine(health: Health) -> None:
    health.set_handoffs_fail(BAD, True)
    assert health.problem(BAD) == "handoffs fail"
    assert health.usable(BOTH) == BOTH, "it computes its prompts itself"
    health.set_handoffs_fail(BAD, False)
    assert health.problem(BAD) is None


def test_failures_of_one_moment_make_one_pause(health: Health, clock: Clock) -> None:
    """Twenty requests fail when an engine dies. They were all sent before the pause."""
    for _ in range(20):
        health.failed(BAD)
    clock.now += 0.6
    assert list(health.unpaused([BAD])) == [BAD]
    health.trying(BAD)
    assert not health.unpaused([BAD]), "one trial at a time"
    health.failed(BAD)
    clock.now += 0.6
    assert not health.unpaused([BAD]), "the second pause is longer"
    clock.now += 0.5
    assert health.unpaused([BAD])
