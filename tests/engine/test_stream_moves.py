"""A decode engine dies while it answers: its streams go on at another one, as if nothing was."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from assembled_stream import AssembledStream

from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer
from disagg.testing.waiting import eventually
from engine.conftest import Fleet, routed
from engine.streams import Streamed, events_of, stream

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


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def asked_anew() -> list[tuple[str, dict[str, Any]]]:
    """What tokens do not continue, twice each: with an even number of them, one at each engine."""
    options = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    long = " ".join(WORDS * 8)
    talk = {**options, "messages": [{"role": "user", "content": long}]}
    text = {**options, "prompt": long}
    drawn = {"temperature": 0.9, "seed": 7}
    newer: dict[str, Any] = {"model": "tiny", "temperature": 0}
    forced = {"type": "function", "function": {"name": "weather"}}
    asked: list[tuple[str, dict[str, Any]]] = [
        (COMPLETION, {**text, "stop": ["never said"], "logprobs": 2}),
        (COMPLETION, {**text, "frequency_penalty": 0.6, "return_token_ids": True}),
        (COMPLETION, {**text, **drawn, "n": 2, "stream_options": {"include_usage": True}}),
        (COMPLETION, {**text, "prompt": [long, f"else {long}"], "echo": True}),
        (CHAT, {**talk, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {**talk, **drawn}),
        (CHAT, {**talk, "tools": [WEATHER], "tool_choice": forced}),
        (CHAT, {**talk, "response_format": {"type": "json_object"}}),
        ("/v1/responses", {**newer, "input": long, "max_output_tokens": TOKENS}),
        ("/v1/messages", {**newer, "messages": talk["messages"], "max_tokens": TOKENS}),
    ]
    return [one for one in asked for _ in range(2)]


def kill(server: VllmServer, what: str) -> None:
    """`core`: the process that computes, so that the HTTP server is left to say so."""
    assert server.process is not None
    if what == "group":
        os.killpg(server.process.pid, signal.SIGKILL)
        return
    server.core().kill()


def are_up(url: str) -> bool:
    """Whether all engines get requests."""
    engines = client().get(f"{url}/ui/state", timeout=10).json()["engines"]
    return all(engine["state"] == "up" for engine in engines)


@pytest.mark.parametrize(
    ("dying", "heir", "what"),
    [("files", "tcp", "core"), pytest.param("tcp", "consumer", "group", marks=pytest.mark.slow)],
)
def test_all_streams_end_as_undisturbed(fleet: Fleet, dying: str, heir: str, what: str) -> None:
    fleet.wake("producer", "single", dying, heir)
    asked, anew = requests(), asked_anew()
    decodes = [getattr(fleet, dying), getattr(fleet, heir)]
    seen = [Streamed() for _ in asked]
    told = [list[bytes]() for _ in anew]
    with routed([fleet.producer], decodes, pairing={"decode": "round_robin"}) as url:
        assert eventually(lambda: are_up(url))
        with ThreadPoolExecutor(len(asked) + len(anew)) as pool:
            running: list[Future[Any]] = [
                pool.submit(stream, url, path, body, one)
                for (path, body), one in zip(asked, seen, strict=True)
            ]
            running += [
                pool.submit(events_of, url, path, body, each)
                for (path, body), each in zip(anew, told, strict=True)
            ]
            counts = [0]
            while min(counts) < 4:
                time.sleep(0.05)
                # A forced call's arguments come seldom: two events, of which one names it.
                counts = [*(one.events for one in seen), *(2 * len(each) for each in told)]
                for at, job in enumerate(running):
                    if job.done():
                        job.result()
                        counts[at] = TOKENS
            kill(decodes[0], what)
            for job in running:
                job.result(120)
        metrics = client().get(f"{url}/metrics", timeout=10).text
    moved = {
        line.split('"')[1]: float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("disagg_router_migrations_total")
    }
    assert set(moved) == {"continued", "anew"}
    assert min(moved.values()) >= 3, "half of them began at the engine that died"
    assert 'disagg_router_in_flight{role="decode"} 0.0' in metrics
    with ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = list(pool.map(lambda one: fleet.single.post(*one).json(), asked))
        whole = list(
            pool.map(lambda one: events_of(fleet.single.url, one[0], one[1], []), anew[::2])
        )
    for reference, one in zip(undisturbed, seen, strict=True):
        assert one.finish == ["length"]
        one.check(reference)
    for at, each in enumerate(told):
        got, wanted = (AssembledStream.of(b"".join(one)) for one in (each, whole[at // 2]))
        assert got.fields == wanted.fields, anew[at]
        assert got.once == wanted.once, anew[at]
        assert got.numbers == [*range(len(got.numbers))]
        assert {len(names) for names in got.names.values()} == {1}, got.names
