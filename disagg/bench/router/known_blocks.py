"""`disagg bench router --knows`: what it costs to choose by what the engines' caches hold.

One process, no engines: the router's own index gets the events of many engines, then chooses for
known prompts, applies events as fast as it can, and at last hears a publisher over ZMQ while a
probe measures how late the event loop is.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import zmq
import zmq.asyncio
from rich.console import Console
from rich.table import Table

from disagg.bench.results import Output, target
from disagg.bench.results import Table as ResultTable
from disagg.bench.router import publish_events
from disagg.bench.router.publish_events import BLOCK, batch, event_of
from disagg.router.caches import block_keys, messages
from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.caches.events import EngineEvents, Source, Turns
from disagg.router.pairing.cache_aware import CacheAware
from disagg.router.pairing.in_flight import InFlight
from disagg.router.pairing.policies import PrefixAffinity
from disagg.router.request.plan import RequestPlan
from disagg.router.server.server import settle
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.tables import show
from disagg.testing.ports import free_port

_PROMPT = 8000  # tokens
_SHARED = 64  # blocks of a system prompt that all engines hold
_CHOICES = 3000
_APPLIED = 400_000  # blocks of events that are applied at once
_RATE = 200_000  # blocks a second
_PROBE_S = 0.001
_HEARD_S, _STARTS_S = 10.0, 20


@dataclass(frozen=True)
class KnownBlocksPlan:
    """How much is known. `blocks`: of all engines together, besides those that all share."""

    engines: int = 1000
    blocks: int = 1_000_000


def run(plan: KnownBlocksPlan, output: Output) -> int:
    """Measure and print. Returns the exit status."""
    caches = EngineCaches()
    before = _resident()
    prompts = _fill(plan, caches)
    settle()  # as a router is, once it is ready
    figures: dict[str, Any] = {
        "engines": plan.engines,
        "blocks": len(caches.index),
        "keys_by": "compiled" if block_keys.is_compiled else "python",
        "bytes_per_block": round((_resident() - before) / len(caches.index)),
    }
    figures |= _choices(plan, caches, prompts)
    figures |= asyncio.run(_applied())
    figures |= asyncio.run(_heard())
    table = Table("figure", "value", title="choosing by what caches hold")
    for name, value in figures.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:,}")
    show(table)
    aims = [
        target("a choice, us, p99", figures["choice_p99_us"], at_most=200),
        target("events, blocks for a second of CPU", figures["blocks_cpu_s"], at_least=_RATE),
    ]
    output.write("router-knows", figures, [ResultTable("Known blocks", [figures])], aims)
    for aim in filter(None, aims):
        Console(highlight=False).print(f"{aim.name}: {aim.measured:,} ({aim.limit})")
    return 0


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _endpoints(count: int) -> list[EngineEndpoint]:
    return [EngineEndpoint(f"prefill-{n}", "prefill", f"http://{n}") for n in range(count)]


def _fill(plan: KnownBlocksPlan, caches: EngineCaches) -> list[array[int]]:
    """Each engine holds whole prompts, all of which begin alike. Returns some of the prompts."""
    generator = random.Random(1)
    prompts: list[array[int]] = []
    system = publish_events.ids(generator, _SHARED)
    own = _PROMPT // BLOCK - _SHARED
    for engine in _endpoints(plan.engines):
        picture, left = caches.join(engine.name), plan.blocks // plan.engines
        while left > 0:
            count = min(own, left)
            left -= count
            prompt = [*system, *publish_events.ids(generator, count)]
            for raw in messages.events(batch([event_of(prompt, 0)])):
                for _ in picture.apply(messages.event(raw)):
                    pass
            if count == own and len(prompts) < 500:
                prompts.append(array("I", prompt))
    return prompts


def _choices(
    plan: KnownBlocksPlan, caches: EngineCaches, prompts: Sequence[array[int]]
) -> dict[str, Any]:
    """Times from a parsed body to an engine, keys included. `keys_…`: of working out the keys
    alone, which nothing that is known shortens. `again_…`: of the same request's second choice,
    which finds the keys, as decode's choice follows prefill's."""
    in_flight, engines = InFlight(RouterMetrics()), _endpoints(plan.engines)
    policy = CacheAware(in_flight, caches, PrefixAffinity(in_flight))
    generator, found = random.Random(2), 0
    seconds, cpu, keys, again = (list[float]() for _ in range(4))
    for _ in range(_CHOICES):
        body = {"prompt": [*generator.choice(prompts), generator.randrange(1000)]}
        request = RequestPlan("/v1/completions", body)
        began, cpu_began = time.perf_counter(), time.thread_time()
        chosen = policy.choose(request, engines)
        cpu.append(time.thread_time() - cpu_began)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        policy.choose(request, engines)
        again.append(time.perf_counter() - began)
        began = time.perf_counter()
        for _ in PromptBlocks(body["prompt"]).keys(BLOCK):
            pass
        keys.append(time.perf_counter() - began)
        assert request.blocks is not None
        found += caches.held(request.blocks, None, chosen.engine.name).on_gpu >= _PROMPT
    for times in (seconds, cpu, keys, again):
        times.sort()
    return {
        "choice_p50_us": _us(seconds, 0.5),
        "choice_p99_us": _us(seconds, 0.99),
        "choice_cpu_p50_us": _us(cpu, 0.5),
        "choice_cpu_p99_us": _us(cpu, 0.99),
        "keys_p50_us": _us(keys, 0.5),
        "keys_p99_us": _us(keys, 0.99),
        "again_p50_us": _us(again, 0.5),
        "again_p99_us": _us(again, 0.99),
        "choices_right": round(found / _CHOICES, 3),
    }


async def _applied() -> dict[str, Any]:
    """Events as fast as they can be decoded and applied. Half of the blocks come, half go."""
    caches = EngineCaches()
    turns, picture = Turns(caches.index), caches.join("e")
    payloads = publish_events.payloads(64)
    began, cpu, blocks = time.perf_counter(), time.process_time(), 0
    while blocks < _APPLIED:
        for payload in payloads:
            await turns.apply(picture, messages.events(payload))
        blocks = picture.stored + picture.removed
    return {
        "blocks_s": round(blocks / (time.perf_counter() - began)),
        "blocks_cpu_s": round(blocks / (time.process_time() - cpu)),
    }


async def _heard() -> dict[str, Any]:
    """How late the loop is while a publisher sends `_RATE` blocks a second, and without it."""
    caches, port = EngineCaches(), free_port()
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    source = Source(f"tcp://127.0.0.1:{port}")
    picture = caches.join("e")
    events = EngineEvents("e", source, picture, Turns(caches.index), context)
    idle = await _lags(2.0)
    task = asyncio.create_task(events.run())
    command = [sys.executable, "-m", publish_events.__name__, str(port), str(_RATE), str(_HEARD_S)]
    publisher = await asyncio.create_subprocess_exec(*command)
    try:
        for _ in range(_STARTS_S * 100):
            if events.counts.batches:
                break
            await asyncio.sleep(0.01)
        began, before = time.perf_counter(), picture.stored + picture.removed
        lags = await _lags(_HEARD_S / 2)
        rate = (picture.stored + picture.removed - before) / (time.perf_counter() - began)
    finally:
        with suppress(ProcessLookupError):  # on a busy machine it is done before
            publisher.terminate()
        await publisher.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        context.destroy(linger=0)
    return {
        "heard_blocks_s": round(rate),
        "gaps": events.counts.gaps,
        "lag_p50_us": _us(lags, 0.5),
        "lag_p99_us": _us(lags, 0.99),
        "lag_most_us": _us(lags, 1),
        "lag_idle_p50_us": _us(idle, 0.5),
        "lag_idle_p99_us": _us(idle, 0.99),
    }


async def _lags(seconds: float) -> list[float]:
    """How much later than asked a sleep ends, again and again."""
    lags, until = list[float](), time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        await asyncio.sleep(_PROBE_S)
        lags.append(time.perf_counter() - began - _PROBE_S)
    return sorted(lags)


def _us(lags: Sequence[float], share: float) -> int:
    return round(lags[min(len(lags) - 1, int(len(lags) * share))] * 1e6)
