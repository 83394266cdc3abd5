"""Which engines serve, drain and are gone; and that a load never notices."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from unit.router.conftest import FakeEngine, Loop, wait_for
from unit.router.managed import Managed, fakes, managed

from disagg.config import Role
from disagg.router.discovery import registry as registry_module
from disagg.router.discovery.registry import CONFIGURED, DRAINS, NONE_NOW, Registry
from disagg.router.discovery.source import Report
from disagg.router.topology import Away, EngineEndpoint

LOAD = 500


def endpoint(role: Role, host: str, authorization: str | None = None) -> EngineEndpoint:
    return EngineEndpoint("", role, f"http://{host}", authorization)


class Scene:
    """A server that only remembers what it was told, and how busy a test says it is."""

    def __init__(self) -> None:
        self.told: list[tuple[list[EngineEndpoint], dict[str, Away]]] = []
        self.busy: dict[str, int] | None = {}
        self.fails = False

    async def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        if self.fails:
            self.fails = False
            raise OSError("told to")
        self.told.append((list(engines), dict(down)))

    async def running(self) -> Mapping[str, int] | None:
        return self.busy

    def names(self) -> dict[str, str]:
        return {engine.name: engine.url for engine in self.told[-1][0]}

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 (a condition of another's)
                await asyncio.sleep(0.01)


def played(play: Callable[[Registry, Scene], Awaitable[None]], *hosts: str, **more: Any) -> None:
    async def run() -> None:
        scene = Scene()
        engines = [endpoint("decode", host) for host in hosts]
        registry = Registry(engines, more.pop("sources", ()), **{"drain_s": 30, **more})
        registry.start(scene)
        try:
            await play(registry, scene)
        finally:
            await registry.close()

    asyncio.run(run())


def test_names_are_stable_and_are_not_used_again() -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        registry.report("x", [endpoint("decode", "b"), endpoint("prefill", "b")])
        await scene.until(lambda: scene.told)
        assert scene.names() == {
            "prefill-0": "http://b",
            "decode-0": "http://a",
            "decode-1": "http://b",
        }
        registry.report("x", [endpoint("decode", "c")])
        await scene.until(lambda: len(scene.names()) == 2 and not scene.told[-1][1])
        registry.report("x", [endpoint("decode", "d"), endpoint("decode", "b")])
        await scene.until(lambda: "decode-3" in scene.names())
        assert scene.names() == {
            "decode-0": "http://a",
            "decode-1": "http://b",
            "decode-3": "http://d",
        }

    played(play, "a")


def test_engines_are_in_the_order_of_their_numbers() -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        assert [e.name for e in registry.engines] == [f"decode-{n}" for n in range(12)]

    played(play, *(f"h{n}" for n in range(12)))


def test_an_engine_that_two_have_serves_until_both_lack_it() -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        registry.report("x", [endpoint("decode", "a")])
        registry.report(CONFIGURED, [])
        assert [e.url for e in registry.engines] == ["http://a"]
        assert (await registry.listed())[0]["sources"] == ["x"]
        registry.report("x", [])
        assert registry.engines == []

    played(play, "a")


def test_an_engine_that_comes_back_while_it_drains_serves_on() -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        scene.busy = {"decode-0": 1}
        registry.report(CONFIGURED, [])
        await scene.until(lambda: scene.told and scene.told[-1] == ([], {"decode-0": DRAINS}))
        registry.report(CONFIGURED, [endpoint("decode", "a")])
        await scene.until(lambda: scene.names() == {"decode-0": "http://a"})
        assert scene.told[-1][1] == {}

    played(play, "a")


@pytest.mark.parametrize("busy", [{"decode-0": 1}, None], ids=["runs", "unknown"])
def test_an_engine_drains_until_it_is_idle_for_sure(busy: dict[str, int] | None) -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        scene.busy = busy
        registry.report(CONFIGURED, [])
        await scene.until(lambda: scene.told)
        await asyncio.sleep(0.5)
        assert scene.told[-1] == ([], {"decode-0": DRAINS})
        scene.busy = {}
        await scene.until(lambda: scene.told[-1] == ([], {}))

    played(play, "a")


@pytest.mark.parametrize("busy", [{"decode-0": 1}, None], ids=["runs", "unknown"])
def test_no_drain_is_for_ever(busy: dict[str, int] | None) -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        scene.busy = busy
        registry.report(CONFIGURED, [])
        await scene.until(lambda: scene.told and scene.told[-1] == ([], {}))

    played(play, "a", drain_s=0.3)


def test_what_operators_removed_stays_away_until_no_source_has_it() -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        await registry.remove("decode-0")
        registry.report("x", [endpoint("decode", "b")])
        assert [e.name for e in registry.engines] == ["decode-1"], "a source reports again"
        registry.report(CONFIGURED, [])
        registry.report(CONFIGURED, [endpoint("decode", "a")])
        assert [e.name for e in registry.engines] == ["decode-0", "decode-1"]

    played(play, "a")


def test_operators_take_a_removal_back() -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        await registry.remove("decode-0")
        shown = await registry.add("decode", "http://a")
        assert (shown["name"], shown["sources"]) == ("decode-0", [CONFIGURED, "operators"])
        assert scene.names() == {"decode-0": "http://a"}

    played(play, "a")


def test_a_new_password_is_used() -> None:
    async def play(registry: Registry, scene: Scene) -> None:
        registry.report(CONFIGURED, [endpoint("decode", "a", "Basic new")])
        await scene.until(lambda: scene.told)
        (engine,) = scene.told[-1][0]
        assert (engine.name, engine.authorization) == ("decode-0", "Basic new")

    played(play, "a")


def test_a_server_that_fails_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_AGAIN_S", 0.05)

    async def play(registry: Registry, scene: Scene) -> None:
        scene.fails = True
        registry.report("x", [endpoint("decode", "b")])
        await scene.until(lambda: scene.told and len(scene.told[-1][0]) == 2)

    played(play, "a")


def test_a_source_that_fails_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_AGAIN_S", 0.05)

    class Failing:
        name, roles, runs = "x", frozenset[Role](["prefill"]), 0

        async def run(self, report: Report) -> None:
            self.runs += 1
            report([endpoint("prefill", f"p{self.runs}")])
            raise KeyError("told to")

    async def play(registry: Registry, scene: Scene) -> None:
        await scene.until(lambda: scene.told and "prefill-2" in scene.names())

    played(play, "a", sources=[Failing()])


def test_a_role_without_engines_is_awaited_if_some_may_come() -> None:
    class Silent:
        name, roles = "x", frozenset[Role](["prefill"])

        async def run(self, report: Report) -> None:
            await asyncio.sleep(60)

    async def with_source(registry: Registry, scene: Scene) -> None:
        assert registry.down == {"prefill": NONE_NOW, "decode": NONE_NOW}

    async def with_operators(registry: Registry, scene: Scene) -> None:
        assert registry.down == {"decode": NONE_NOW}

    async def without(registry: Registry, scene: Scene) -> None:
        assert registry.down == {}

    played(with_source, sources=[Silent()])
    played(with_operators, operators_add=True)
    played(without)


def test_names_of_the_gone_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MOST_NAMES", 10)

    async def play(registry: Registry, scene: Scene) -> None:
        for number in range(100):
            registry.report("x", [endpoint("decode", f"h{number}")])
            await scene.until(lambda: len(registry._engines) <= 2)
        assert len(registry._names) <= 13
        assert registry._names["decode", "http://a"] == "decode-0"

    played(play, "a", drain_s=0)


# ---- under load --------------------------------------------------------------------------------


def is_right(answer: httpx.Response, stream: bool) -> bool:
    if answer.status_code != 200:
        return False
    if not stream:
        return bool(answer.json()["role"] == "decode")
    *chunks, last, rest = answer.text.split("\n\n")
    numbers = [json.loads(chunk.removeprefix("data: "))["n"] for chunk in chunks]
    return (numbers, last, rest) == (list(range(3)), "data: [DONE]", "")


class Coming:
    """Engines that come and go at random, by operators' calls. One that is gone is stopped at
    once, so that a request which still needed it would break."""

    def __init__(self, loop: Loop, at: Managed) -> None:
        self._loop, self._at = loop, at
        self._running: dict[str, FakeEngine] = {}
        self.over = threading.Event()
        self.went = 0

    def come(self, role: Role) -> None:
        engine = FakeEngine(role, chunk_s=0.01)
        self._loop.run(engine.start())
        self._running[self._at.add(role, engine.url).json()["name"]] = engine

    def go(self, name: str) -> None:
        assert self._at.remove(name).status_code == 200
        assert wait_for(lambda: name not in self._at.engines(), 20)
        self._loop.run(self._running.pop(name).stop())
        self.went += 1

    def run(self) -> None:
        draw = random.Random(7)
        while not self.over.is_set():
            role: Role = draw.choice(["prefill", "decode"])
            self.come(role)
            self.go(draw.choice([name for name in self._running if name.startswith(role)]))

    def close(self) -> None:
        for engine in self._running.values():
            self._loop.run(engine.stop())


def test_no_request_notices_that_engines_come_and_go(loop: Loop) -> None:
    streams = [bool(number % 2) for number in range(LOAD)]
    with managed(loop) as at, ThreadPoolExecutor(17) as pool:
        engines = Coming(loop, at)
        for role in ("prefill", "decode", "decode"):
            engines.come(role)
        changes = pool.submit(engines.run)
        asked = [pool.submit(at.complete, stream=stream) for stream in streams]
        answers = [one.result() for one in asked]
        engines.over.set()
        changes.result()
        wrong = [
            answer.text
            for answer, stream in zip(answers, streams, strict=True)
            if not is_right(answer, stream)
        ]
        engines.close()
    assert wrong == []
    assert engines.went >= 3


def test_a_load_without_decode_now_and_then_waits(loop: Loop) -> None:
    """The only decode engine goes, and another one comes a little later."""
    with (
        fakes(loop, "decode", "decode") as (first, second),
        managed(loop, (), [first.url]) as at,
        ThreadPoolExecutor(9) as pool,
    ):
        first.chunk_s = second.chunk_s = 0.02
        asked = [pool.submit(at.complete, stream=True) for _ in range(200)]
        for _ in range(3):
            at.remove(next(iter(at.states())))
            assert wait_for(lambda: at.states() == {})
            first, second = second, first
            at.add("decode", first.url)
        assert not asked[-1].done()
        assert all(is_right(one.result(), stream=True) for one in asked)
