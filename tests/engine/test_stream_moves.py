"""A decode engine dies while it answers: its streams go on at another one, as if nothing was."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from disagg.bench.http import client
from disagg.bench.vllm_server import VllmServer
from engine.conftest import Fleet, routed
from engine.processes import core_of
from engine.streams import Streamed, stream

STREAMS, TOKENS = 16, 320
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "while",
    "prefill",
    "and",
    "decode",
    "are",
    "apart",
]


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Completions, some of token ids, and chats; some prompts are too short to be handed over."""
    asked = []
    for number in range(STREAMS):
        text = " ".join(
            WORDS[(number + i * (number + 1)) % len(WORDS)] for i in range(6 + 9 * number)
        )
        options = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        if number % 8 == 3:  # ends in half a character, and so the text begins with it
            ids = [(7 * at + 77) % 200 + 1 for at in range(50 * number)]
            asked.append(("/v1/completions", {**options, "prompt": ids}))
        elif number % 2:
            asked.append(("/v1/completions", {**options, "prompt": text}))
        else:
            messages = [{"role": "user", "content": text}]
            asked.append(("/v1/chat/completions", {**options, "messages": messages}))
    return asked


def kill(server: VllmServer, what: str) -> None:
    """`core`: the process that computes, so that the HTTP server is left to say so."""
    assert server.process is not None
    if what == "group":
        os.killpg(server.process.pid, signal.SIGKILL)
        return
    core_of(server).kill()


@pytest.mark.parametrize(
    ("dying", "heir", "what"), [("files", "tcp", "core"), ("tcp", "consumer", "group")]
)
def test_all_streams_end_as_undisturbed(fleet: Fleet, dying: str, heir: str, what: str) -> None:
    fleet.wake("producer", "single", dying, heir)
    asked = requests()
    decodes = [getattr(fleet, dying), getattr(fleet, heir)]
    seen = [Streamed() for _ in asked]
    with routed([fleet.producer], decodes, pairing={"decode": "round_robin"}) as url:
        with ThreadPoolExecutor(STREAMS) as pool:
            running = [
                pool.submit(stream, url, path, body, one)
                for (path, body), one in zip(asked, seen, strict=True)
            ]
            while not all(one.events >= 4 for one in seen):
                time.sleep(0.05)
            kill(decodes[0], what)
            for job in running:
                job.result(120)
        metrics = client().get(f"{url}/metrics", timeout=10).text
    moved = {
        line.split('"')[1]: float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("disagg_router_migrations_total")
    }
    assert set(moved) == {"continued"}
    assert moved["continued"] >= 3, "half of them began at the engine that died"
    assert 'disagg_router_in_flight{role="decode"} 0.0' in metrics
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = list(pool.map(lambda one: fleet.single.post(*one).json(), asked))
    for reference, one in zip(undisturbed, seen, strict=True):
        assert one.finish == ["length"]
        one.check(reference)
