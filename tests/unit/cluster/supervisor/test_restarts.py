"""How long what died is left alone before it starts again."""

from __future__ import annotations

from disagg.cluster.supervisor.restarts import pause_s, pause_text


def test_at_once_after_one_death_then_ever_later() -> None:
    pauses = [pause_s(deaths, 1, 60) for deaths in range(1, 11)]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_pause_is_said_and_none_is_not() -> None:
    assert [pause_text(wait_s) for wait_s in (0, 0.5, 4)] == ["", " in 0.5 s", " in 4 s"]
