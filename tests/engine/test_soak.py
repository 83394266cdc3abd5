"""A short form of `disagg bench soak`: sockets are cut and workers stopped under load."""

from __future__ import annotations

import psutil
from rich.console import Console

from disagg.chaos import soak
from disagg.chaos.sabotage import Saboteur
from disagg.testing.vllm_server import VllmServer
from engine.conftest import Fleet, routed

ENGINES = ("producer", "tcp", "files", "single")


def test_sabotage(fleet: Fleet) -> None:
    check_under_sabotage([fleet.producer], [fleet.tcp, fleet.files], fleet.single, requests=60)


def check_under_sabotage(
    prefills: list[VllmServer], decodes: list[VllmServer], single: VllmServer, requests: int
) -> None:
    """All answers are right, and nothing is held in the end; a fifth of the clients leaves."""
    workers: list[psutil.Process] = [server.worker() for server in (*prefills, *decodes)]
    saboteur = Saboteur(3.9, lambda: workers)
    with routed(prefills, decodes, pairing={"local_prefill_tokens": 0}) as url:
        saboteur.start()
        try:
            asked = soak.plans(requests, cancel=0.2)
            outcomes = soak.load(Console(), url, single, asked, concurrency=8)
        finally:
            saboteur.end()
        held = soak.held_after_quiet(url)
    assert held == []
    assert outcomes["wrong"] == outcomes["error"] == 0, outcomes
    assert outcomes["right"] > requests / 2
    assert saboteur.done["sockets cut"] + saboteur.done["stopped for 3.9 s"] > 0, saboteur.done
