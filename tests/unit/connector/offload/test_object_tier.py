"""The tier of an object store under real schedulers and real servers, without a model.

As `test_modelless.py`, whose fixtures these are: every byte is compared. Whatever the server does,
answers are right.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_servers import ENVIRONMENT, S3Server, Server, running_s3, running_valkey
from slow_proxy import slow_proxy
from unit.connector.modelless import BLOCK, Engine, answer, run
from unit.connector.offload.test_modelless import (
    Start,
    ask,
    computed,
    forget,
    half,
    prompt_of,
    start,
)

from disagg.connector.offload import pace, worker
from disagg.errors import ConfigError
from disagg.store.objects import guard

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.parametrize("start", ["host"], indirect=True),
]
__all__ = ["start"]


@pytest.fixture(params=["valkey", "s3"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    running = running_valkey if request.param == "valkey" else running_s3
    with running(tmp_path / "log") as server:
        yield server


def objects(server: Server, port: int | None = None, **more: Any) -> dict[str, Any]:
    """port: of what stands in front of it."""
    port = port or server.port
    url = server.url.replace(f":{server.port}/", f":{port}/")
    if isinstance(server, S3Server):
        more |= {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1"}
    return {"url": url, "reset_keeps_objects": True, "timeout_s": 30, **more}


def written(engine: Engine, count: int) -> None:
    """Wait until it has written so many chunks."""
    shared = half(engine)._shared
    assert shared is not None
    run([engine], lambda: shared.stats.stored >= count)


def test_another_engine_finds_the_objects(start: Start, server: Server) -> None:
    prompt = prompt_of(6 * BLOCK, seed=5)
    engine = start(objects=objects(server))
    ask(engine, prompt)
    written(engine, 6)
    other = start(objects=objects(server))
    ask(other, prompt)
    assert computed(other, 0) == 3
    shared = half(other)._shared
    assert shared is not None
    assert (shared.name, shared.stats.hits) == ("objects", 6)
    forget(other, host=True)
    ask(other, prompt)
    assert shared.stats.hits == 12


def test_other_weights_after_a_reset(start: Start, server: Server) -> None:
    prompt = prompt_of(4 * BLOCK, seed=6)
    engine = start(objects=objects(server, reset_keeps_objects=False))
    ask(engine, prompt)
    written(engine, 4)
    forget(engine, host=True)
    since = len(engine.scheduled)
    ask(engine, prompt)
    assert computed(engine, since) >= len(prompt)


def test_an_outage_costs_time_only(
    start: Start, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed and started again while requests come; then stopped, so that it only does not
    answer."""
    monkeypatch.setattr(guard, "_LONGEST_PAUSE_S", 0.1)
    engine = start(objects=objects(server, timeout_s=0.5))
    bases = [prompt_of(4 * BLOCK, seed=20 + n) for n in range(4)]
    chosen = random.Random(1)
    for state in ("up", "killed", "up", "stopped", "up"):
        match state:
            case "killed":
                server.kill()
            case "up" if not server.is_running:
                server.start()
        if state == "stopped":
            with server.stopped():
                some(engine, bases, chosen)
                run([engine], lambda: not is_used(engine))
        else:
            some(engine, bases, chosen)
        if state == "up":
            until_counted(engine, "stored", chosen)
        elif state == "killed":
            until_counted(engine, "stores_failed", chosen)
        run([engine], lambda: not is_used(engine))


@pytest.mark.parametrize("delay_s", [0.3, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_slow_store_is_left(
    start: Start,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    delay_s: float,
) -> None:
    """It answers every question, but computing is faster. Then it is fast again."""
    monkeypatch.setattr(pace, "_PAUSE_S", 1.0)
    with slow_proxy(server.port) as slow, logged(caplog.handler):
        settings = {"slots": 128, "lookup_deadline_s": 5, "objects": objects(server, slow.port)}
        prompts = [prompt_of(6 * BLOCK, seed=40 + n) for n in range(9)]
        other = start(**settings)
        for prompt in prompts:
            ask(other, prompt)
        written(other, 6 * len(prompts))
        monkeypatch.setattr(pace, "SLACK_S", 0.2)
        engine = start(**settings)
        ask(engine, prompt_of(6 * BLOCK, seed=39))  # it learns how long this takes
        taken = []
        with slow.by(delay_s):
            for prompt in prompts:
                began = time.monotonic()
                ask_alone(engine, prompt)
                taken.append(time.monotonic() - began)
        # Each would take 0.9 s or 5 s and more: a lookup, and two rounds of reads.
        assert sum(taken) < 4.5
        assert half(engine)._too_slow >= len(prompts) - 2
        (line,) = {one for one in caplog.messages if "slower than computing" in one}
        assert line.startswith("the tier objects is slower")
        run([engine], engine.is_idle, 60)
        monkeypatch.setattr(pace, "SLACK_S", 5.0)
        shared = half(engine)._shared
        assert shared is not None
        before, deadline = shared.stats.hits, time.monotonic() + 30
        while shared.stats.hits == before:
            assert time.monotonic() < deadline
            forget(engine, host=True)
            ask(engine, prompts[0])
        assert "the tier objects is fast enough again" in caplog.messages


@contextlib.contextmanager
def logged(handler: logging.Handler) -> Iterator[None]:
    """What the connector logs goes there: vLLM's configuration propagates nothing."""
    pace.logger.addHandler(handler)
    try:
        yield
    finally:
        pace.logger.removeHandler(handler)


def ask_alone(engine: Engine, prompt: list[int]) -> None:
    """As `ask`, without waiting for what goes on in the tiers."""
    name = engine.add(prompt, 3, None)
    run([engine], lambda: name in engine.finished)
    assert engine.answers[name] == answer(prompt, 3, engine.groups)


def until_counted(engine: Engine, name: str, chosen: random.Random) -> None:
    """Ask until a count of the shared tier grows."""
    shared = half(engine)._shared
    assert shared is not None
    before, deadline = getattr(shared.stats, name), time.monotonic() + 60
    while getattr(shared.stats, name) == before:
        assert time.monotonic() < deadline
        ask(engine, prompt_of(2 * BLOCK, seed=chosen.randrange(1 << 30)))
        engine.step()


def is_used(engine: Engine) -> int:
    """Chunks in use, of both tiers."""
    shared = half(engine)._shared
    assert shared is not None
    return shared.stats.in_use + half(engine)._host.stats.in_use


def some(engine: Engine, bases: list[list[int]], chosen: random.Random) -> None:
    asked = {}
    for number in range(8):
        prompt = [*bases[number % 4], *prompt_of(BLOCK + number, seed=chosen.randrange(1 << 30))]
        asked[engine.add(prompt, 3, None)] = prompt
        if number % 3 == 0:
            half(engine)._host.clear()
    run([engine], lambda: set(asked) <= set(engine.finished), 60)
    for name, prompt in asked.items():
        assert engine.answers[name] == answer(prompt, 3)


def test_a_tier_that_is_far_behind_misses_some_uses(
    start: Start, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_MOST_TOUCHES", 2)
    engine = start(objects=objects(server, timeout_s=2))
    half_of_worker = engine.lifecycle.connector.worker
    with server.stopped():
        for _ in range(50):
            half_of_worker._touch([b"key"])
        assert half_of_worker._write_pool._work_queue.qsize() <= 2
    run([engine], lambda: half_of_worker._touching._value == 2)


def test_both_tiers_at_once_are_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory and objects are both set"):
        start(objects={"url": "valkey://host"}, directory=str(tmp_path))


def test_no_error_shows_a_password(start: Start) -> None:
    for wrong in (
        {"url": "valkey://user:hunter2@host"},
        {"url": "valkey://host", "password": "hunter2"},
        {"url": "valkey://:hun/ter2@host", "timeout_s": 0},
    ):
        with pytest.raises(ConfigError) as caught:
            start(objects=wrong)
        assert "ter2" not in str(caught.value)
