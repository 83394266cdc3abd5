"""The ring of samples, and the events that it finds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from disagg.router.server.history import History
from disagg.router.server.sampler import Taken


def taken(at: float, restarted: list[str] | None = None, **states: str) -> Taken:
    return {"sample": {"at": at}, "states": states, "restarted": restarted or []}


def shown(history: History, since: float = 0) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(history.since(since))
    return parsed


def events(history: History) -> list[tuple[float, str, str, str]]:
    return [(e["at"], e["engine"], e["kind"], e["why"]) for e in shown(history)["events"]]


def test_ten_minutes_are_kept() -> None:
    history = History()
    for number in range(1000):
        history.add(taken(1.0 + number, a="up"))
    times = [sample["at"] for sample in shown(history)["samples"]]
    assert times == [float(n) for n in range(701, 1001)]
    assert [sample["at"] for sample in shown(history, 998)["samples"]] == [999, 1000]
    assert shown(history, 1000)["samples"] == []


def test_changes_are_events() -> None:
    history = History()
    history.add(taken(1, a="up", b="starts again"))
    assert events(history) == []  # as it was found
    history.add(taken(3, a="unreachable", b="up"))
    history.add(taken(5, a="unreachable", b="drains", c="up"))
    history.add(taken(7, ["c"], a="up", c="up"))
    assert events(history) == [
        (3, "a", "down", "unreachable"),
        (3, "b", "up", "starts again"),
        (5, "b", "leaves", "drains"),
        (5, "c", "added", "up"),
        (7, "a", "up", "unreachable"),
        (7, "c", "restarted", ""),
        (7, "b", "gone", ""),
    ]
    assert shown(history)["engines"] == {"a": 7, "c": 7}
    assert [event["at"] for event in shown(history, 5)["events"]] == [7, 7, 7]


def test_events_are_bounded() -> None:
    history = History()
    for number in range(500):
        history.add(taken(number, a="up" if number % 2 else "down"))
    assert len(events(history)) == 100


def test_a_sample_that_fails_is_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    """The history goes on after it."""
    outcomes: list[Taken | Exception | None] = [
        ValueError("broken"),
        ValueError("broken"),
        None,
        taken(7, a="up"),
    ]
    history = History()

    done = asyncio.Event()

    async def take() -> Taken | None:
        if not outcomes:
            done.set()
            return None
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def run() -> None:
        async with history.running(take, every_s=0.001):
            async with asyncio.timeout(20):
                await done.wait()

    asyncio.run(run())
    assert [sample["at"] for sample in shown(history)["samples"]] == [7]
    assert len([r for r in caplog.records if "gap" in r.message]) == 1
