"""Tiers under real schedulers, driven by our lifecycle: no model, and every byte is compared.

A byte of a wrong or half-copied block makes an assertion fail in the step that attends to it.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transport.host_device import COMPILER
from unit.connector import model_device
from unit.connector.modelless import (
    BLOCK,
    PLAIN,
    POISON,
    PREFILL,
    VOCABULARY,
    Engine,
    Layers,
    answer,
    run,
)
from vllm.config.scheduler import SchedulerPolicy
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventBatch, EventPublisher
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request, RequestStatus

from disagg.connector.kv_cache_layout import NULL_BLOCK
from disagg.connector.offload import pace
from disagg.connector.offload.connector import DisaggOffloadConnector
from disagg.connector.offload.messages import TierLoad
from disagg.connector.offload.scheduler import OffloadScheduler
from disagg.errors import ConfigError

CHUNK = 2 * 2 * BLOCK * 2 * 8 * 4  # layers, KV heads, tokens, K and V, head dim, float32
pytestmark = pytest.mark.usefixtures("distributed")
Start = Callable[..., Engine]


def tiers(slots: int, **extra: Any) -> dict[str, Any]:
    size = CHUNK * int(extra.get("blocks_per_chunk", 1))
    return {
        "kv_connector": "DisaggOffloadConnector",
        "kv_connector_module_path": "disagg.connector.offload",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_bytes": slots * size,
            "reset_keeps_files": True,  # tests forget the host tier by it
            **extra,
        },
    }


@pytest.fixture(params=["host", "emulated"])
def start(
    model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts engines with tiers, whose blocks are host memory or on a device; ends them."""
    if request.param == "emulated":
        if COMPILER is None:
            pytest.skip("needs g++ to run the kernel on the host")
        model_device.use(monkeypatch)
    # A model that computes nothing is faster than any tier.
    monkeypatch.setattr(pace, "SLACK_S", 60.0)
    started: list[Engine] = []

    def start(
        slots: int = 64,
        *,
        blocks: int = 48,
        layout: str = "LBHNC",
        groups: Sequence[Layers] = PLAIN,
        policy: SchedulerPolicy = "fcfs",
        **extra: Any,
    ) -> Engine:
        # Longer than the default: on busy cores what is found would depend on the hour.
        config = tiers(slots * chunk_blocks(groups), **{"lookup_deadline_s": 30, **extra})
        layout_ = KVCacheLayout[layout]
        started.append(
            Engine(model, config, blocks=blocks, layout=layout_, groups=groups, policy=policy)
        )
        poison_before_loads(started[-1])
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def chunk_blocks(groups: Sequence[Layers]) -> int:
    """Of the smallest blocks, how many the shortest chunk has."""
    return math.lcm(*(group.block for group in groups)) // BLOCK


def poison_before_loads(engine: Engine) -> None:
    """What a load leaves out is seen, though the blocks were those of the same prompt before."""
    worker = engine.lifecycle.connector.worker
    load = worker._load

    def poisoned(work: TierLoad, after: Any) -> None:
        for filling in work.fillings:
            for cache in engine.caches.values():
                cache.view(torch.uint8)[filling.block_ids] = POISON
        load(work, after)

    worker._load = poisoned


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def half(engine: Engine) -> OffloadScheduler:
    connector = engine.connector
    if not isinstance(connector, DisaggOffloadConnector):
        connector = next(c for c in connector._connectors if isinstance(c, DisaggOffloadConnector))
    return connector.scheduler


def check(engine: Engine) -> None:
    """Nothing is in use when nothing is to be done, and the null block is as it was."""
    assert all(bool((part == POISON).all()) for part in engine.bytes_of([NULL_BLOCK]))
    scheduler = half(engine)
    scheduler._host.check_integrity()
    assert not scheduler._host.stats.in_use
    assert not scheduler._host.stats.stray
    assert not scheduler._copying
    assert not scheduler._tracked
    assert not scheduler._writing
    if scheduler._shared is not None:
        scheduler._shared.check_integrity()
        assert not scheduler._shared.stats.in_use
        assert not scheduler._shared.stats.stray


def ask(engine: Engine, prompt: list[int], count: int = 3) -> str:
    name = engine.add(prompt, count, None)
    run([engine], lambda: name in engine.finished and engine.is_idle())
    assert engine.answers[name] == answer(prompt, count, engine.groups)
    check(engine)
    return name


def computed(engine: Engine, since: int) -> int:
    """Tokens that went through a forward pass from that step on."""
    return sum(step.total_num_scheduled_tokens for step in engine.scheduled[since:])


def forget(engine: Engine, *, host: bool = False) -> None:
    assert engine.scheduler.reset_prefix_cache(reset_connector=host)


@pytest.mark.parametrize("windows", [False, True])
def test_after_a_reset_nothing_of_before_is_found(
    start: Start, tmp_path: Path, windows: bool
) -> None:
    """Weights may be others. For other engines all is as it was."""
    groups = (Layers(), Layers(window=BLOCK)) if windows else PLAIN
    engine = start(directory=str(tmp_path), reset_keeps_files=False, groups=groups)
    prompt = prompt_of(7 * BLOCK + 5, seed=1)
    ask(engine, prompt)
    files = {*tmp_path.rglob("*.safetensors")}
    forget(engine, host=True)
    for expected in (len(prompt) + 2, len(prompt) + 2 - 7 * BLOCK):
        since = len(engine.scheduled)
        ask(engine, prompt)
        assert computed(engine, since) == expected
        forget(engine)
    of_both = {*tmp_path.rglob("*.safetensors")}
    assert len(of_both) == 2 * len(files) > 0
    other = start(directory=str(tmp_path), groups=groups)
    ask(other, prompt)
    assert computed(other, 0) == len(prompt) + 2 - 7 * BLOCK
    assert {*tmp_path.rglob("*.safetensors")} == of_both


def test_what_runs_at_a_reset_is_not_kept(start: Start) -> None:
    engine = start()
    prompt = prompt_of(5 * BLOCK, seed=2)
    name = engine.add(prompt, 2 * BLOCK, None)
    run([engine], lambda: bool(engine.scheduled))
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "it holds its blocks"
    run([engine], lambda: name in engine.finished and engine.is_idle())
    assert not half(engine)._host._chunks
    assert engine.answers[name] == answer(prompt, 2 * BLOCK, engine.groups)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("source", ["host", "files"])
def test_what_was_computed_is_loaded(
    start: Start, tmp_path: Path, source: str, per_chunk: int, layout: str
) -> None:
    extra = {"directory": str(tmp_path)} if source == "files" else {}
    engine = start(layout=layout, blocks_per_chunk=per_chunk, **extra)
    prompt = prompt_of(7 * BLOCK + 5, seed=1)
    ask(engine, prompt)
    forget(engine, host=source == "files")
    since = len(engine.scheduled)
    ask(engine, prompt)
    there = 7 // per_chunk * per_chunk * BLOCK
    assert computed(engine, since) == len(prompt) - there + 2  # two of the three new tokens


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_the_rest_of_a_chunk_whose_beginning_is_there(start: Start, per_chunk: int) -> None:
    """The engine's own cache ends inside of a chunk: only what it lacks is written."""
    engine = start(blocks_per_chunk=per_chunk)
    prompt = prompt_of(4 * BLOCK, seed=2)
    ask(engine, prompt)
    forget(engine)
    ask(engine, prompt[: BLOCK + 1], 1)  # one block in the own cache
    since = len(engine.scheduled)
    ask(engine, prompt)
    assert computed(engine, since) == 3


def test_generated_blocks_are_kept(start: Start) -> None:
    engine = start()
    prompt = prompt_of(BLOCK, seed=3)
    name = ask(engine, prompt, 3 * BLOCK)
    turn = [*prompt, *engine.answers[name], *prompt_of(9, seed=4)]
    forget(engine)
    since = len(engine.scheduled)
    ask(engine, turn, 1)
    assert computed(engine, since) == len(turn) - 3 * BLOCK  # the fourth was never computed whole


def test_another_engine_and_another_life_find_the_files(start: Start, tmp_path: Path) -> None:
    prompt = prompt_of(6 * BLOCK, seed=5)
    ask(start(directory=str(tmp_path)), prompt)
    for _ in range(2):
        other = start(directory=str(tmp_path))
        ask(other, prompt)
        assert computed(other, 0) == 3


def test_one_load_for_requests_of_one_prefix(start: Start, tmp_path: Path) -> None:
    engine = start(directory=str(tmp_path))
    prompt = prompt_of(6 * BLOCK, seed=6)
    ask(engine, prompt)
    forget(engine, host=True)
    names = [engine.add([*prompt, n], 2, None) for n in range(5)]
    run([engine], lambda: set(names) <= set(engine.finished) and engine.is_idle())
    for n, name in enumerate(names):
        assert engine.answers[name] == answer([*prompt, n], 2)
    check(engine)
    directory = half(engine)._shared
    assert directory is not None
    assert directory.stats.hits == 6


@pytest.mark.parametrize("spoiled", [0, 3, 5])
def test_what_cannot_be_read_is_computed(start: Start, tmp_path: Path, spoiled: int) -> None:
    engine = start(directory=str(tmp_path))
    prompt = prompt_of(6 * BLOCK, seed=7)
    ask(engine, prompt)
    forget(engine, host=True)
    request = Request("x", prompt, SamplingParams(), None, block_hasher=engine._hasher)
    (key,) = half(engine)._chunks.keys(request, 0, spoiled, spoiled + 1)
    (file,) = tmp_path.rglob(f"{key.hex()}*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ask(engine, prompt)
    run([engine], lambda: file.exists() and file.read_bytes() == whole)


def test_a_silent_disk_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    """The folder is a pipe's: a read of it hangs until somebody writes."""
    engine = start(directory=str(tmp_path), load_deadline_s=0.3)
    prompt = prompt_of(3 * BLOCK, seed=8)
    ask(engine, prompt)
    forget(engine, host=True)
    files = sorted(tmp_path.rglob("*.safetensors"))
    for file in files:
        file.unlink()
        os.mkfifo(file)
    began = time.monotonic()
    name = engine.add(prompt, 3, None)
    run([engine], lambda: name in engine.finished)
    assert time.monotonic() - began < 10
    assert engine.answers[name] == answer(prompt, 3)
    for file in files:  # let the threads that hang go
        for _ in range(50):
            try:
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                time.sleep(0.01)
    run([engine], engine.is_idle)


class Recorder(EventPublisher):
    """Keeps what vLLM publishes, in place of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[type, Any]] = []

    def publish(self, events: EventBatch) -> None:
        for event in events.events:
            if event.medium == "CPU":
                self.seen += [(type(event), hash_) for hash_ in event.block_hashes]

    def shutdown(self) -> None:
        """Nothing runs."""

    def take(self) -> list[tuple[type, Any]]:
        seen, self.seen = self.seen, []
        return seen


def test_events_tell_what_comes_and_goes(model: Path) -> None:
    engine = Engine(model, tiers(2), events=True)
    recorder = engine.scheduler.kv_event_publisher = Recorder()
    try:
        ask(engine, prompt_of(2 * BLOCK, seed=9), 1)
        first = recorder.take()
        ask(engine, prompt_of(2 * BLOCK, seed=10), 1)
        second = recorder.take()
    finally:
        engine.close()
    stored = [hash_ for kind, hash_ in second if kind is BlockStored]
    removed = [hash_ for kind, hash_ in second if kind is BlockRemoved]
    assert [kind for kind, _ in first] == [BlockStored] * 2
    assert {*removed} == {hash_ for _, hash_ in first}
    assert len(stored) == len(removed) == 2


@pytest.mark.parametrize(("seed", "eviction"), [(0, "lru"), (1, "arc"), (2, "turns"), (3, "turns")])
def test_any_order(start: Start, tmp_path: Path, seed: int, eviction: str) -> None:
    """Shared prefixes, aborts and preemption, with a cache and a pool of a few blocks."""
    any_order(start, tmp_path, seed, eviction, PLAIN, slots=6, blocks=20)


def any_order(
    start: Start,
    tmp_path: Path,
    seed: int,
    eviction: str,
    groups: Sequence[Layers],
    slots: int,
    blocks: int,
) -> Engine:
    generator = random.Random(seed)
    extra = {"directory": str(tmp_path)} if seed % 2 else {}
    per = 1 if any(group.state for group in groups) else 1 + seed % 3
    engine = start(
        slots, blocks=blocks, blocks_per_chunk=per, eviction=eviction, groups=groups, **extra
    )
    slow(engine.lifecycle.connector.worker, "_out_of_blocks", "_into_blocks")
    bases = [prompt_of(8 * BLOCK, seed=100 + n) for n in range(4)]
    asked: dict[str, tuple[list[int], int]] = {}
    for _ in range(120):
        match generator.random():
            case x if x < 0.35 and len(engine.scheduler.requests) < 8:
                base = generator.choice(bases)[: generator.randrange(1, 8 * BLOCK)]
                prompt = [
                    *base,
                    *prompt_of(generator.randrange(1, 40), generator.randrange(1 << 30)),
                ]
                count = generator.randrange(1, 50)
                asked[engine.add(prompt, count, None)] = prompt, count
            case x if x < 0.40 and engine.scheduler.requests:
                gone = generator.choice(sorted(engine.scheduler.requests))
                engine.abort(gone)
                asked.pop(gone, None)
            case x if x < 0.43:
                half(engine)._host.clear()
            case _:
                engine.step()
        half(engine)._host.check_integrity()
    run([engine], lambda: set(asked) <= set(engine.finished) and engine.is_idle())
    for name, (prompt, count) in asked.items():
        assert engine.answers[name] == answer(prompt, count, engine.groups)
    check(engine)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 250))
def test_any_order_often(start: Start, tmp_path: Path, seed: int) -> None:
    """What goes wrong once in some hundred times is found here."""
    test_any_order(start, tmp_path, seed, ["lru", "arc", "turns"][seed % 3])


def slow(what: Any, *methods: str, seconds: float = 0.002) -> None:
    """A thread that the machine gives little time."""
    for name in methods:
        original = getattr(what, name)

        def late(*args: Any, original: Any = original) -> Any:
            time.sleep(seconds)
            return original(*args)

        setattr(what, name, late)


STATES = (Layers(state=True), Layers())
MIXED = (Layers(window=70), Layers(block=2 * BLOCK))


@pytest.fixture(
    params=[PLAIN, (Layers(window=70), Layers()), STATES, MIXED],
    ids=["plain", "sliding and full", "states and full", "blocks of two sizes"],
)
def pair(
    model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, Engine]]:
    """A producer and a consumer with tiers, of one folder."""
    extra = {"storage_path": str(tmp_path / "s"), "lease_s": 20.0}
    handoff = {
        "kv_connector": "DisaggConnector",
        "kv_connector_module_path": "disagg.connector",
        "kv_connector_extra_config": extra,
    }

    def engine(role: str) -> Engine:
        children = [handoff, tiers(64, directory=str(tmp_path / "t"))]
        return Engine(
            model,
            {
                "kv_connector": "MultiConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "connectors": [{**c, "kv_role": role} for c in children]
                },
            },
            groups=request.param,
        )

    engines = engine("kv_producer"), engine("kv_consumer")
    yield engines
    for one in engines:
        one.close()


def is_over(pair: Sequence[Engine], name: str) -> bool:
    """The last of them has answered, and nothing is under way."""
    return name in pair[-1].finished and all(engine.is_idle() for engine in pair)


def handed(producer: Engine, consumer: Engine, prompt: list[int], count: int) -> str:
    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: first in producer.finished)
    return consumer.add(prompt, count, producer.params[first])


def three_turns(pair: tuple[Engine, Engine]) -> list[int]:
    """Of one conversation, each handed off. Returns the prompt of the turn after them."""
    producer, consumer = pair
    prompt = prompt_of(5 * BLOCK + 3, seed=11)
    for turn in range(3):
        name = handed(producer, consumer, prompt, 40)
        run(pair, partial(is_over, pair, name))
        assert consumer.answers[name] == answer(prompt, 40, consumer.groups)
        prompt = [*prompt, *consumer.answers[name], turn]
        check(consumer)
        check(producer)
    return prompt


def test_beside_the_handoff(pair: tuple[Engine, Engine]) -> None:
    """One connector loads, the other takes note; either may be the one."""
    _, consumer = pair
    prompt = three_turns(pair)
    forget(consumer)
    since = len(consumer.scheduled)
    ask(consumer, prompt)
    assert computed(consumer, since) < (1 + chunk_blocks(consumer.groups)) * BLOCK


def test_what_a_handoff_has_not_brought_is_not_stored(pair: tuple[Engine, Engine]) -> None:
    """The client leaves while the blocks are on their way: nothing of them is right yet."""
    producer, consumer = pair
    (handoff, _) = consumer.lifecycle.connector._connectors
    slow(handoff.worker.consumer, "_load", seconds=0.1)
    prompt = prompt_of(6 * BLOCK, seed=12)
    name = handed(producer, consumer, prompt, 3)
    status = RequestStatus.WAITING_FOR_REMOTE_KVS
    run(pair, lambda: consumer.scheduler.requests[name].status is status)
    consumer.abort(name)
    run(pair, lambda: all(e.is_idle() for e in pair))
    assert not half(consumer)._host.stats.stored
    forget(consumer)
    ask(consumer, prompt)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"host_bytes": 100}, "host_bytes: 100"),
        ({"eviction": "fifo"}, "eviction"),
        ({"disk": 1}, "kv_connector_extra_config.disk"),
    ],
)
def test_what_cannot_be_is_refused(start: Start, extra: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        start(**extra)
