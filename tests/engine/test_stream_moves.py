"""A decode engine dies while it answers: its streams go on at another one, as if nothing was."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from disagg.bench.http import client
from disagg.bench.vllm_server import VllmServer
from engine.conftest import Fleet, routed

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


@dataclass
class Streamed:
    """What a client saw of one stream."""

    text: str = ""
    events: int = 0
    ids: set[str] = field(default_factory=set)
    finish: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Completions and chats; some prompts are handed over, some are too short for it."""
    asked = []
    for number in range(STREAMS):
        text = " ".join(
            WORDS[(number + i * (number + 1)) % len(WORDS)] for i in range(6 + 9 * number)
        )
        options = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        if number % 2:
            asked.append(("/v1/completions", {**options, "prompt": text}))
        else:
            messages = [{"role": "user", "content": text}]
            asked.append(("/v1/chat/completions", {**options, "messages": messages}))
    return asked


def stream(url: str, path: str, body: dict[str, Any], seen: Streamed) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client().stream("POST", f"{url}{path}", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line:
                continue
            assert not seen.is_done, "nothing follows the end"
            if line == "data: [DONE]":
                seen.is_done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            seen.events += 1
            seen.ids.add(event["id"])
            seen.usage = event.get("usage") or seen.usage
            for choice in event["choices"]:
                seen.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                seen.finish += [choice["finish_reason"]] if choice["finish_reason"] else []


def kill(server: VllmServer, what: str) -> None:
    """`core`: the process that computes, so that the HTTP server is left to say so."""
    assert server.process is not None
    if what == "group":
        os.killpg(server.process.pid, signal.SIGKILL)
        return
    children = psutil.Process(server.process.pid).children(recursive=True)
    next(child for child in children if "EngineCore" in " ".join(child.cmdline())).kill()


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
        choice = reference["choices"][0]
        assert one.text == (choice.get("text") or choice["message"]["content"])
        assert one.finish == [choice["finish_reason"]] == ["length"]
        assert len(one.ids) == 1
        assert one.is_done
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert one.usage[count] == reference["usage"][count]
