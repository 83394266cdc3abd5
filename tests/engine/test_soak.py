"""A short form of `disagg bench soak`: sockets are cut and workers stopped under load."""

from __future__ import annotations

import psutil
from rich.console import Console

from disagg.bench import soak
from disagg.bench.sabotage import Saboteur
from engine.conftest import Fleet, routed

ENGINES = ("producer", "tcp", "files", "single")


def test_sabotage(fleet: Fleet) -> None:
    pair = [fleet.producer, fleet.tcp, fleet.files]
    workers: list[psutil.Process] = [server.worker() for server in pair]
    saboteur = Saboteur(3.9, lambda: workers)
    with routed([fleet.producer], [fleet.tcp, fleet.files]) as url:
        saboteur.start()
        try:
            asked = soak.plans(60, cancel=0.2)
            outcomes = soak.load(Console(), url, fleet.single, asked, concurrency=8)
        finally:
            saboteur.end()
        held = soak.held_after_quiet(url)
    assert held == []
    assert outcomes["wrong"] == outcomes["error"] == 0, outcomes
    assert outcomes["right"] > 30
    assert saboteur.done["sockets cut"] + saboteur.done["stopped for 3.9 s"] > 0, saboteur.done
