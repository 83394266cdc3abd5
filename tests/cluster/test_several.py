"""One `disagg serve` with two deployments behind one address: real Ray, real engines on the CPU."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.test_serve import (
    Served,
    command,
    end,
    handed_over,
    launch,
    listening,
    shown_by_ray,
    states,
    temporary,
)
from cluster.titles import title
from disagg.testing.checkpoint import make_model
from disagg.testing.http import client
from disagg.testing.ports import free_port

# Four engines share the cores with whatever else runs.
START_S, STOP_S = 500, 30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * START_S)]

TINY, WIDE = "tiny", "org/wide"


def content(folder: Path, port: int) -> dict[str, Any]:
    make_model(folder / "tiny")
    make_model(folder / "wide", layers=2, hidden=128)
    engine = {
        "args": {
            "dtype": "float32",
            "max_model_len": 2048,
            "block_size": 128,
            "num_gpu_blocks_override": 64,
            "enforce_eager": True,
        },
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
        "startup_timeout_s": START_S,
    }
    pool = {"resources": {"num_cpus": 0}}
    each: dict[str, Any] = {"engine": engine, "prefill": pool, "decode": pool}
    return {
        "deployments": [
            {
                "name": "chat",
                "model": {"path": str(folder / "tiny"), "served_name": TINY},
                **each,
                "engine": engine | {"max_restarts": 1},
            },
            {
                "name": "code",
                "model": {"path": str(folder / "wide"), "served_name": WIDE},
                **each,
                "limits": {"max_prompt_tokens": 600},
            },
        ],
        "router": {"port": port, "pairing": {"local_prefill_tokens": 0}},
    }


def ask(port: int, model: str, prompt: str) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return client().post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)


def answer(port: int, model: str, prompt: str) -> str:
    got = ask(port, model, prompt)
    assert got.status_code == 200, got.text
    assert got.json()["model"] == model
    text: str = got.json()["choices"][0]["text"]
    return text


def decode_actor(served: Served) -> psutil.Process:
    """The process of chat's decode engine: of its first start, or of its restart."""
    shown = re.findall(r"chat(?:/|: )decode-0\b.* http://127\.0\.0\.1:(\d+)", served.text)
    return listening(int(shown[-1]))


def supervisors(served: Served) -> list[psutil.Process]:
    below = psutil.Process(served.process.pid).children(recursive=True)
    found = [process for process in below if "ray::SupervisorActor" in title(process)]
    assert len(found) == 2, found
    return found


def test_two_deployments_and_their_deaths(tmp_path: Path) -> None:
    port = free_port()
    with temporary() as temp:
        served = launch(tmp_path, temp, "several", content(tmp_path, port))
        try:
            ended = served.process.poll
            served.until(lambda: "Ready: " in served.text or ended() is not None, START_S)
            assert "chat/prefill-0: " in served.text
            assert "Ready: " in served.text, served.text
            served.note()
            first = _both_serve(served, port)
            _one_restarts(served, port, first)
            _the_router_restarts(served, port, first)
            _one_is_given_up(served, port, first)
            served.note()
            assert served.end(signal.SIGTERM) < STOP_S
            assert served.process.returncode == 0
            served.check_nothing_left()
        finally:
            end(served)


def _both_serve(served: Served, port: int) -> dict[str, str]:
    """Each model answers through its own two engines. Returns the answers."""
    listed = client().get(f"http://127.0.0.1:{port}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in listed] == [TINY, WIDE]
    names = ("prefill-0", "decode-0")
    everyone = [f"{deployment}/{name}" for deployment in ("chat", "code") for name in names]
    assert states(port) == dict.fromkeys(everyone, "up")
    prompt = "the quick brown fox " * 50
    first = {model: answer(port, model, prompt) for model in (TINY, WIDE)}
    served.until(lambda: handed_over(port) == 2, 30)
    refused = ask(port, "chat", "a deployment's name is not its model's")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].endswith(f"there are: {WIDE}, {TINY}")
    long = "the quick brown fox " * 150
    assert (ask(port, WIDE, long).status_code, ask(port, TINY, long).status_code) == (400, 200)

    shown = command(served, "status", f"http://127.0.0.1:{port}")
    said = shown.communicate(timeout=60)[0]
    assert shown.returncode == 0, said
    assert "code/decode-0" in said
    sample = partial(shown_by_ray, served, "ray_disagg_router_requests_total", status="200")
    served.until(lambda: bool(sample(deployment="chat") and sample(deployment="code")), 60)

    scaling = command(served, "scale", "decode=1")
    said = scaling.communicate(timeout=60)[0]
    assert scaling.returncode == 2, said
    assert "choose one with --name" in said
    scaling = command(served, "scale", "decode=1", "--name", "code")
    said = scaling.communicate(timeout=60)[0]
    assert scaling.returncode == 0, said
    return first


def _one_restarts(served: Served, port: int, first: dict[str, str]) -> None:
    for supervisor in supervisors(served):
        supervisor.kill()
    decode_actor(served).kill()
    served.until(lambda: "chat: engine decode-0 died" in served.text, 60)
    prompt = "the quick brown fox " * 50

    def is_back() -> bool:
        assert answer(port, WIDE, prompt) == first[WIDE], "the other one is disturbed"
        return "chat: decode-0 is back" in served.text

    served.until(is_back, START_S)
    for name in ("chat", "code"):
        assert f"{name}: the supervisor is back" in served.text
    served.until(lambda: states(port)["chat/decode-0"] == "up", 60)
    assert answer(port, TINY, prompt) == first[TINY]
    assert re.findall(r"engine (\S+) died", served.text) == ["decode-0"]


def _the_router_restarts(served: Served, port: int, first: dict[str, str]) -> None:
    listening(port).kill()
    served.until(lambda: "the router is back" in served.text, 120)
    assert len(states(port)) == 4
    for model, text in first.items():
        served.until(lambda model=model: ask(port, model, "x").status_code == 200, 60)  # type: ignore[misc]
        assert answer(port, model, "the quick brown fox " * 50) == text
    assert served.text.count(" is back: ") == 1, "the engines did not notice"


def _one_is_given_up(served: Served, port: int, first: dict[str, str]) -> None:
    decode_actor(served).kill()
    served.until(lambda: "chat is given up, the others go on" in served.text, 60)
    assert answer(port, WIDE, "the quick brown fox " * 50) == first[WIDE]
    served.until(lambda: states(port).get("chat/prefill-0") == "given up", 30)
    refused = ask(port, TINY, "no engine has this model now")
    assert refused.status_code == 503
    ready = client().get(f"http://127.0.0.1:{port}/ready", timeout=60)
    assert ready.status_code == 200
    assert ready.json()["models"] == {"chat": False, "code": True}
    assert served.process.poll() is None
