"""The pause before an engine or the supervisor restarts."""

from __future__ import annotations

from disagg.cluster.supervisor.restarts import pause_s, pause_text


def test_the_pause_grows_with_each_death_in_a_row() -> None:
    pauses = [pause_s(deaths, 1, 60) for deaths in range(1, 11)]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_the_message_names_a_pause_only_if_there_is_one() -> None:
    assert [pause_text(wait_s) for wait_s in (0, 0.5, 4)] == ["", " in 0.5 s", " in 4 s"]
