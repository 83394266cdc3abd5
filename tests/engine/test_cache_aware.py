"""A router that hears the KV events of two real engines, and sends prompts where their blocks are.

The engines have small caches, so blocks are evicted. What an engine says in its answer's usage is
the truth that the router's picture is held against.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.caches.listeners import Listeners
from disagg.router.caches.picture import Picture
from disagg.router.topology import EngineEndpoint
from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer
from disagg.vllm_compat import versions
from engine.conftest import routed, running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(versions.matches("<0.31"), reason="this vLLM does not tell its ports"),
]
BLOCK, BLOCKS = 32, 72


class Engine:
    """A vLLM server that publishes KV events."""

    def __init__(
        self,
        start: Callable[..., VllmServer],
        model: Path,
        log: Path,
        name: str,
        transfer: dict[str, object] | None = None,
        blocks: int = BLOCKS,
    ) -> None:
        # As `disagg serve` starts them: a free port of the node's address, for each.
        config = {"enable_kv_cache_events": True, "publisher": "zmq"}
        config |= {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
        args: tuple[str, ...] = ("--num-gpu-blocks-override", str(blocks))
        args += ("--max-model-len", str(max(2048, blocks // 2 * BLOCK)))
        # For /reset_prefix_cache, and for the node's address.
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
        self.server = start(
            name,
            model,
            log,
            transfer,
            args=(*args, "--kv-events-config", json.dumps(config)),
            env=env,
            block_size=BLOCK,
        )

    def find(self) -> None:
        """Ask the engine where it publishes."""
        (source,) = client().get(f"{self.url}/kv_event_sources", timeout=10).json().values()
        self.events, self.replay = source["endpoint"], source["replay_endpoint"]

    @property
    def url(self) -> str:
        return self.server.url

    def ask(self, ids: list[int], **more: Any) -> int:
        """The tokens that its own cache had of a prompt. Asked of the engine, not of the router."""
        return cached(self.url, ids, **more)


def cached(url: str, ids: list[int], **more: Any) -> int:
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0, **more}
    answer = client().post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


@pytest.fixture(scope="module")
def engines(
    model: Path, vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Engine]]:
    logs = tmp_path_factory.mktemp("logs")
    both = [Engine(vllm_server, model, logs / f"e{n}.log", f"e{n}") for n in range(2)]
    with running([one.server for one in both]):
        for one in both:
            one.find()
        yield both


@pytest.fixture
def router(engines: list[Engine]) -> Iterator[str]:
    """Decode engines only, so each request is one leg."""
    addresses = {
        one.url: {"endpoint": one.events, "replay_endpoint": one.replay} for one in engines
    }
    for one in engines:
        one.server.post("/reset_prefix_cache", {}).raise_for_status()
    with routed(
        [], engines, engines={"kv_events": addresses}, pairing={"decode": "cache_aware"}
    ) as url:
        yield url


def metric(url: str, name: str, **labels: str) -> float:
    text = client().get(f"{url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    want = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(line.split()[-1]) for line in lines if all(one in line for one in want))


def until(check: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)


def ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(300, 1000) for _ in range(count)]


def blocks(url: str, name: str) -> float:
    return metric(url, "disagg_router_cache_blocks", engine=name)


def test_a_prompt_goes_where_its_prefix_is(engines: list[Engine], router: str) -> None:
    generator = random.Random(1)
    first, other = ids(generator, 400), ids(generator, 400)
    holder = engines[1]
    assert holder.ask(first) == 0, "past the router, which hears of it all the same"
    until(lambda: blocks(router, "decode-1") == 400 // BLOCK)
    assert blocks(router, "decode-0") == 0
    for length in (400, 380, 290):
        turn = [*first[:length], *ids(generator, 40)]
        assert cached(router, turn) == length // BLOCK * BLOCK, "the idle one would have none"
    assert cached(router, other) == 0


@contextmanager
def followed(engines: list[Engine]) -> Iterator[EngineCaches]:
    """What a router knows of these engines, by the names of their servers."""
    loop, caches = asyncio.new_event_loop(), EngineCaches()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def follow() -> Listeners:
        listeners = Listeners(caches)
        listeners.follow(
            [
                EngineEndpoint(one.server.name, "decode", one.url, None, one.events, one.replay)
                for one in engines
            ]
        )
        return listeners

    listeners = asyncio.run_coroutine_threadsafe(follow(), loop).result(10)
    try:
        yield caches
    finally:
        asyncio.run_coroutine_threadsafe(listeners.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def test_the_picture_is_what_the_engines_hold(engines: list[Engine]) -> None:
    """Under evictions: what each engine has of a prompt is what its picture said before."""
    generator = random.Random(2)
    prompts: list[list[int]] = [ids(generator, 100)]
    hits = 0
    with followed(engines) as caches:
        pictures = [caches.pictures[one.server.name] for one in engines]
        still(lambda: sum(one.stored for one in pictures))
        for number in range(120):
            engine = engines[number % 2]
            base = generator.choice(prompts)
            base = base[: generator.randrange(len(base) // 2, len(base) + 1)]
            prompt = [*base, *ids(generator, generator.randrange(0, 120))]
            prompts.append(prompt)
            held = caches.held(PromptBlocks(prompt), "tiny", engine.server.name)
            assert held.below == 0
            before = caches.pictures[engine.server.name].stored
            assert engine.ask(prompt) == held.on_gpu
            hits += held.on_gpu > 0
            new = (len(prompt) - held.on_gpu) // BLOCK
            until(partial(has_stored, caches.pictures[engine.server.name], before + new))
        assert hits > 40
        assert all(one.removed > 20 for one in pictures), "the caches are too large for this test"
        assert all(not one.ignored for one in pictures)
        engines[0].server.post("/reset_prefix_cache", {}).raise_for_status()
        engines[0].ask(ids(generator, BLOCK // 2))  # events go out with steps
        until(lambda: len(pictures[0]) == 0)
        assert len(pictures[1]) > 0


def has_stored(picture: Picture, blocks: int) -> bool:
    return picture.stored == blocks


def test_prefill_engines_hold_what_the_router_expects(engines: list[Engine]) -> None:
    """The usage in answers of prefill legs is what the router expected of their engines."""
    addresses = {
        one.url: {"endpoint": one.events, "replay_endpoint": one.replay} for one in engines
    }
    pairing = {"prefill": "cache_aware", "local_prefill_tokens": 0}
    generator = random.Random(3)
    system = ids(generator, 200)
    with routed(
        engines, engines, engines={"kv_events": addresses}, pairing=pairing, access_log=False
    ) as url:

        def figures() -> list[float]:
            names = ("expected_tokens", "reported_tokens")
            return [metric(url, f"disagg_router_cache_{name}_total") for name in names]

        for _ in range(12):
            cached(url, [*system, *ids(generator, 60)])
            settled(url)
        expected, reported = figures()
        assert expected == reported >= 11 * (200 // BLOCK * BLOCK)


class RouterProcess:
    """One `disagg router` in front of these engines, which hears their KV events."""

    def __init__(self, engines: list[Engine], folder: Path, name: str) -> None:
        addresses = {
            one.url: {"endpoint": one.events, "replay_endpoint": one.replay} for one in engines
        }
        config = {"engines": {"kv_events": addresses}, "pairing": {"decode": "cache_aware"}}
        (folder / f"{name}.yaml").write_text(json.dumps(config))
        self._out = folder / f"{name}.out"
        words = ["--port", "0", "--config", str(folder / f"{name}.yaml")]
        words += [word for one in engines for word in ("--decode", one.url)]
        with self._out.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "disagg.cli", "router", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self) -> RouterProcess:
        until(lambda: "Ready: " in self._read() or self._process.poll() is not None, 60)
        assert self._process.poll() is None, self._read()
        (line,) = [one for one in self._read().splitlines() if one.startswith("Ready: ")]
        self.url = line.removeprefix("Ready: ").removesuffix("/v1")
        return self

    def ask(self, prompt: list[int]) -> tuple[str, int]:
        """The engine that it chose, and what that engine's cache had of the prompt."""
        name = uuid.uuid4().hex
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        headers = {"x-request-id": name}
        answer = client().post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"].get("prompt_tokens_details") or {}
        until(lambda: any(name in line for line in self._read().splitlines()))
        (line,) = [one for one in self._read().splitlines() if name in one and one[0] == "{"]
        return json.loads(line)["decode"], int(details.get("cached_tokens") or 0)

    def _read(self) -> str:
        return self._out.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_two_routers_agree(engines: list[Engine], tmp_path: Path, count: int) -> None:
    """A load goes through both, and caches are too small for it. One of them is killed amid it, and
    the one in its place gets the picture by replays. Then both know the same, which is what the
    engines hold, and each chooses the engine that holds most."""
    generator = random.Random(count)
    for one in engines:
        one.server.post("/reset_prefix_cache", {}).raise_for_status()
        one.ask(ids(generator, BLOCK // 2))  # events go out with steps
    with ExitStack() as stack:
        caches = stack.enter_context(followed(engines))
        routers = [RouterProcess(engines, tmp_path, name) for name in ("a", "b")]
        for router in routers:
            stack.callback(router.kill)
        for router in routers:
            router.wait_ready()
        prompts: list[list[int]] = [ids(generator, 300)]

        def turn(number: int) -> None:
            base = generator.choice(prompts[-30:])
            kept = generator.choice((0, generator.randrange(len(base) // 2, len(base) + 1)))
            prompt = [*base[:kept], *ids(generator, generator.randrange(100, 400))][:1500]
            routers[number % len(routers)].ask(prompt)
            prompts.append(prompt)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(turn, range(count // 2)))
            routers.pop().kill()
            list(pool.map(turn, range(count // 4)))
            routers.append(RouterProcess(engines, tmp_path, "c"))
            stack.callback(routers[-1].kill)
            routers[-1].wait_ready()
            list(pool.map(turn, range(count // 4)))
        pictures = [caches.pictures[one.server.name] for one in engines]
        assert all(one.removed > 20 for one in pictures), "the caches are too large for this test"
        told_apart = 0
        for number, prompt in enumerate(reversed(prompts[-12:])):  # the first are still held
            until(partial(agree, routers, pictures))
            asked = PromptBlocks(prompt)
            held = [caches.held(asked, "tiny", one.server.name).on_gpu for one in engines]
            first, second = routers[:: 1 - number % 2 * 2]
            chosen, cached = first.ask(prompt)
            assert cached == held[int(chosen[-1])], "the picture is what the engine has"
            if 1.5 * (len(prompt) - max(held)) < len(prompt) - min(held):  # also if it must evict
                told_apart += 1
                assert cached == max(held)
            until(partial(agree, routers, pictures))
            assert second.ask(prompt) == (chosen, (len(prompt) - 1) // BLOCK * BLOCK)
        assert told_apart >= 3


def agree(routers: list[RouterProcess], pictures: list[Picture]) -> bool:
    """Whether all know of as many blocks of each engine."""
    counts = {
        tuple(blocks(one.url, f"decode-{number}") for number in range(len(pictures)))
        for one in routers
    }
    return counts == {tuple(float(len(one)) for one in pictures)}


def settled(url: str) -> None:
    """Wait until the router has heard all events."""
    still(lambda: metric(url, "disagg_router_cache_event_blocks_total"))


def still(figure: Callable[[], float]) -> None:
    """Wait until it has not changed for half a second."""
    last, since = figure(), time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(0.05)
        now = figure()
        if now != last:
            last, since = now, time.monotonic()
