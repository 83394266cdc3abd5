"""Engines that come and go, and what the router shows of their caches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
import zmq
import zmq.asyncio
from unit.router.caches.publisher import IDS, SIZE, Publisher, publishing
from unit.router.conftest import Setup, wait_for

from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.caches.events import EngineEvents, Turns
from disagg.router.caches.listeners import Listeners
from disagg.router.topology import EngineEndpoint


def engine(name: str, publisher: Publisher | None) -> EngineEndpoint:
    found = EngineEndpoint(name, "prefill", f"http://{name}")
    if publisher is None:
        return found
    source = publisher.source
    return replace(found, kv_events=source.endpoint, kv_events_replay=source.replay)


def blocks(caches: EngineCaches, name: str) -> int:
    return caches.held(PromptBlocks(IDS), "m", name).on_gpu // SIZE


def test_who_follows_ends_when_told_whatever_its_socket_says() -> None:
    """Once, an error of a closed socket took the cancellation's place, and it went on for ever."""

    async def test(publisher: Publisher) -> None:
        caches, context = EngineCaches(), zmq.asyncio.Context()
        picture = caches.join("a")
        events = EngineEvents("a", publisher.source, picture, Turns(caches.index), context)
        task = asyncio.create_task(events.run())
        publisher.store(0, 1)
        deadline = time.monotonic() + 60
        while blocks(caches, "a") != 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        context.destroy(linger=0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60)
        assert task in done
        assert task.cancelled()

    with publishing() as publisher:
        asyncio.run(test(publisher))


def test_engines_come_and_go() -> None:
    async def test(first: Publisher, second: Publisher) -> None:
        caches = EngineCaches()
        listeners = Listeners(caches)

        async def until(**held: int) -> None:
            deadline = time.monotonic() + 60
            while {name: blocks(caches, name) for name in held} != held:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)

        first.store(0, 1)
        second.store(0, 1, 2)
        one, other = engine("a", first), engine("b", second)
        listeners.follow([one, other, engine("silent", None)])
        await until(a=2, b=3)
        assert set(caches.pictures) == {"a", "b"}
        listeners.follow([one])
        assert blocks(caches, "b") == 0
        assert set(caches.pictures) == set(listeners.events) == {"a"}
        listeners.follow([one, other])
        await until(a=2, b=3)
        listeners.follow([engine("a", second)])  # the same name at another address
        assert blocks(caches, "a") == 0
        await until(a=3, b=0)
        first.store(2, 3)
        second.store(3)
        await until(a=4)
        await listeners.close()
        assert not caches.pictures

    with publishing() as first, publishing() as second:
        asyncio.run(test(first, second))


@pytest.mark.parametrize("hears", [True, False])
def test_a_router_hears_its_engines(make: Callable[..., Setup], hears: bool) -> None:
    """Both of its engines publish at one address, so both hold the same."""
    with publishing() as publisher:
        publisher.store(0, 1)
        source = publisher.source
        where = {"endpoint": source.endpoint, "replay_endpoint": source.replay}
        policy = "cache_aware" if hears else "prefix_affinity"
        pairing = {"prefill": policy, "local_prefill_tokens": 0}
        setup = make(section={"pairing": pairing, "engines": {"kv_events": {"*": where}}})

        def known() -> dict[str, float]:
            text = httpx.get(f"{setup.url}/metrics", timeout=10).text
            lines = [one for one in text.splitlines() if one.startswith("disagg_router_cache_bl")]
            return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

        if not hears:
            assert known() == {}
            return
        assert wait_for(lambda: known() == {"prefill-0": 2, "decode-0": 2}, 20)
        body = {"model": "m", "prompt": IDS, "max_tokens": 1}
        answer = httpx.post(f"{setup.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 200
        setup.loop.run(setup.server.replace(setup.endpoints[1:], {}))
        assert wait_for(lambda: known() == {"decode-0": 2}, 20)


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded"])
def test_decode_computes_what_it_nearly_holds(make: Callable[..., Setup], policy: str) -> None:
    """The router never sent it the prompt, so without its events prefill computes it."""
    with publishing() as publisher:
        publisher.store(*range(90))
        source = publisher.source
        where = {"endpoint": source.endpoint, "replay_endpoint": source.replay}
        pairing = {"prefill": "cache_aware", "decode": policy, "local_prefill_tokens": 64}
        setup = make(section={"pairing": pairing, "engines": {"kv_events": {"*": where}}})

        def figures(name: str) -> list[str]:
            text = httpx.get(f"{setup.url}/metrics", timeout=10).text
            return [line for line in text.splitlines() if line.startswith(name)]

        known = 'disagg_router_cache_blocks{engine="decode-0"} 90.0'
        assert wait_for(lambda: known in figures("disagg_router_cache_blocks"), 20)
        body = {"model": "m", "prompt": IDS, "max_tokens": 1}
        answer = httpx.post(f"{setup.url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == 200
        local = 'disagg_router_local_total{reason="prefix_known"} 1.0'
        assert (local in figures("disagg_router_local")) is (policy == "cache_aware")
        assert len(setup.prefill.bodies) == (policy != "cache_aware")
