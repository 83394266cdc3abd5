"""When an engine stands still, and when it only waits."""

from __future__ import annotations

from disagg.connector.handoff.stall import PATIENCE_S, StallWatch


class Engine:
    """A watch with a clock and a pool of its own."""

    def __init__(self, name: str = "engine") -> None:
        self.now, self.has_room = 5.0, False
        self.watch = StallWatch(name, lambda: self.has_room, lambda: self.now)
        self.watch.arrived("request")

    def stood_still(self, seconds: float, *, works: bool = False) -> int:
        """How often, in steps of 10 ms."""
        found = 0
        for _ in range(round(seconds * 100)):
            self.now += 0.01
            found += self.watch.stands_still(works=works)
        return found


def test_it_stands_still_once_for_each_patience() -> None:
    engine = Engine()
    assert engine.stood_still(PATIENCE_S) == 0
    assert engine.stood_still(PATIENCE_S * 40) in range(20, 41)


def test_an_engine_that_works_waits_for_its_own_requests() -> None:
    engine = Engine()
    assert engine.stood_still(60, works=True) == 0
    for _ in range(60):  # as long as it works now and then
        assert engine.stood_still(PATIENCE_S * 0.9) == 0
        assert engine.stood_still(0.01, works=True) == 0


def test_an_engine_with_room_waits_for_something_else() -> None:
    engine = Engine()
    engine.has_room = True
    assert engine.stood_still(60) == 0


def test_an_engine_without_requests_is_idle() -> None:
    engine = Engine()
    engine.watch.finished("request")
    assert engine.stood_still(60) == 0


def test_engines_differ_in_their_patience() -> None:
    """So that one engine of a cycle yields first, and the others need not."""
    times = set()
    for number in range(20):
        engine = Engine(f"engine-{number}")
        while not engine.stood_still(0.01):
            pass
        times.add(round(engine.now - 5.0, 2))
    assert len(times) > 15
    assert PATIENCE_S <= min(times) < max(times) <= 2 * PATIENCE_S + 0.02
