"""A model that speaks, SmolLM2-135M-Instruct: its answers through both legs are one engine's.

Random weights find wrong tokens; these find what only text has: ends, stop strings, calls of tools,
and a stream that goes on at another engine in the middle of a sentence.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.models.catalogue import SMOLLM2
from disagg.models.get import get_model
from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer
from disagg.testing.waiting import eventually
from engine.conftest import routed, running, transfer
from engine.streams import Streamed, stream

MODELS = Path(__file__).parents[2] / ".cache" / "models"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DOCUMENT = files("disagg.testing").joinpath("demo_document.txt").read_text()
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "ferry_times",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "string", "enum": ["Monday", "Sunday"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def engines(
    vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """One that prefills, and decodes where it is asked to; and one that decodes. A third would need
    2 GB more, beside the engines of other tests."""
    model = get_model(SMOLLM2.name, MODELS / SMOLLM2.name, Console(stderr=True))
    logs, temporary = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("tmp")
    args = ["--max-model-len", "4096", "--kv-cache-memory-bytes", "320M"]  # of 54 blocks
    args += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    args += ["--middleware", "disagg.engine.routes.Routes"]
    roles = {"both": "kv_both", "decode": "kv_consumer"}
    servers = [
        vllm_server(name, model, logs / name, transfer(role), args, env={"TMPDIR": str(temporary)})
        for name, role in roles.items()
    ]
    with running(servers):
        both, decode = servers
        yield both, decode


@pytest.fixture(scope="module")
def url(engines: tuple[VllmServer, VllmServer]) -> Iterator[str]:
    both, decode = engines
    with routed([both], [decode], pairing={"local_prefill_tokens": 0}) as url:
        yield url


def chat(question: str, document: str = DOCUMENT, **options: Any) -> dict[str, Any]:
    content = f"Read this document.\n\n{document}\n\nAnswer in one sentence: {question}"
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 48,
        "return_token_ids": True,
        **options,
    }


def answered(url: str, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    answer = client().post(f"{url}{path}", json=body, timeout=180)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def what_matters(answer: dict[str, Any]) -> Any:
    """All of the choices but the names that are drawn for each answer."""
    return json.loads(
        json.dumps(answer["choices"]),
        object_hook=lambda o: {k: v for k, v in o.items() if k != "id"},
    )


BODIES = {
    "greedy": chat("Where did the new lens come from?"),
    "seeded": chat("Who was Ingrid Halvorsen?", temperature=0.8, top_p=0.9, seed=7),
    "penalties": chat("What does the shop sell?", frequency_penalty=0.7, repetition_penalty=1.1),
    "stop": chat("How many keepers did the lighthouse have?", stop=["twenty"]),
    "stop and keep": chat("What is the name of the ferry?", stop=["Anna"],
                          include_stop_str_in_output=True),
    "two": chat("What can be seen in the museum?", n=2, temperature=0.9, seed=1, max_tokens=16),
    "tool": chat("When does the ferry leave?", tools=[TOOL],
                 tool_choice={"type": "function", "function": {"name": "ferry_times"}}),
    "structured": chat("When is the museum closed?", response_format={
        "type": "json_schema",
        "json_schema": {"name": "day", "schema": {
            "type": "object", "required": ["day"], "additionalProperties": False,
            "properties": {"day": {"enum": ["Monday", "Thursday", "Sunday"]}}}},
    }),
}  # fmt: skip


_QUICK = ("greedy", "tool")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in BODIES],
)
def test_an_answer_is_one_engine_s(
    engines: tuple[VllmServer, VllmServer], url: str, name: str
) -> None:
    both, decode = engines
    body = BODIES[name]
    before = decode.metric("disagg_handoff_bytes_total", transport="process_memory")
    # Each answer has a cache of its own: its prompt moves, or is computed where it is answered.
    handed = answered(url, {**body, "cache_salt": name})
    moved = decode.metric("disagg_handoff_bytes_total", transport="process_memory") - before
    alone = answered(both.url, {**body, "cache_salt": f"{name}, alone"})
    assert what_matters(handed) == what_matters(alone)
    assert handed["usage"]["prompt_tokens"] > 1000
    # 46 KiB of KV a token.
    assert moved > 1000 * 46 * 1024
    message = handed["choices"][0]["message"]
    if name == "greedy":
        assert "Paris" in message["content"]
        assert handed["choices"][0]["finish_reason"] == "stop"
    if name == "stop":
        assert "twenty" not in message["content"]
    if name == "stop and keep":
        assert message["content"].endswith("Anna")
    if name == "tool":
        # The call of so small a model need not be a valid one, on one engine either.
        assert TOOL["function"]["name"] in json.dumps(message)
    if name == "structured":
        assert set(json.loads(message["content"])) == {"day"}


@pytest.mark.slow
def test_a_conversation_moves_only_what_is_new(
    engines: tuple[VllmServer, VllmServer], url: str
) -> None:
    both, decode = engines
    body = chat("Where did the new lens come from?", cache_salt="conversation")
    sizes = list[float]()
    for question in ("How many keepers did the lighthouse have?", "What did the queen send?"):
        before = decode.metric("disagg_handoff_bytes_total", transport="process_memory")
        answer = answered(url, body)
        sizes.append(
            decode.metric("disagg_handoff_bytes_total", transport="process_memory") - before
        )
        alone = answered(both.url, {**body, "cache_salt": "alone"})
        assert what_matters(answer) == what_matters(alone)
        said = answer["choices"][0]["message"]["content"]
        body["messages"] += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": question},
        ]
    assert 0 < sizes[1] < sizes[0] / 4


@pytest.mark.slow
def test_a_stream_goes_on_in_the_middle_of_a_sentence(
    engines: tuple[VllmServer, VllmServer],
) -> None:
    """The last test: an engine dies."""
    both, decode = engines
    body = {
        "model": "tiny",
        "prompt": f"{DOCUMENT}\n\nIn other words,",
        "temperature": 0,
        "max_tokens": 200,
        "ignore_eos": True,
    }
    alone = answered(both.url, {**body, "cache_salt": "alone"}, TEXT)
    with (
        routed([both], [decode, both], pairing={"local_prefill_tokens": 0}) as url,
        ThreadPoolExecutor(4) as pool,
    ):
        seen = [Streamed() for _ in range(4)]
        work = [pool.submit(stream, url, TEXT, body, one) for one in seen]
        # All of them write; those of this engine must go on at the other one.
        assert eventually(lambda: all(one.events > 20 for one in seen), 120)
        assert decode.process is not None
        os.killpg(decode.process.pid, signal.SIGKILL)
        for done in work:
            done.result(180)
    for one in seen:
        one.check(alone)
