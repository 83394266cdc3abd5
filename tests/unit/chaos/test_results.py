"""Tables and targets of the chaos commands' results files."""

from __future__ import annotations

from pathlib import Path

from disagg.chaos import heal, soak
from disagg.chaos.heal import HealRow
from disagg.chaos.steady_load import SteadyLoad
from disagg.testing.vllm_server import VllmServer


def test_soak_counts_what_is_not_zero() -> None:
    metrics = ['disagg_leases_total{end="released"} 3.0', 'disagg_leases_total{end="late"} 0.0']
    rows = soak._rows({"right": 5}, {"sockets cut": 2}, metrics)
    assert [(row["counted"], row["count"]) for row in rows] == [
        ("answers: right", 5),
        ("sabotage: sockets cut", 2),
        ('`disagg_leases_total{end="released"}`', 3.0),
    ]


def test_deaths_have_a_limit_beyond_the_engines_own_start() -> None:
    rows = [
        HealRow("actor of decode-1", 0.1, 30.0, 26.0, 50, 0),
        HealRow("actor of prefill-1", 0.1, 30.0, 24.0, 50, 1),
        HealRow("router", 0.0, 1.6, 0.0, 8, 7),
    ]
    load = SteadyLoad("", VllmServer("none", Path()))
    found = [one for one in heal._targets(rows, load) if one is not None]
    assert [(one.at, one.measured, one.met) for one in found] == [
        ("", 0, True),  # wrong answers
        ("actor of decode-1", 0, True),
        ("actor of decode-1", 4.0, True),
        ("actor of prefill-1", 1, False),
        ("actor of prefill-1", 6.0, False),
    ]
    assert heal._shown(rows[2])["start of the new engine, s"] is None
