"""Tiers of models with several KV cache groups, or with windows: what a load needs, and no more.

As `test_offload_modelless.py`, whose fixtures these are: no model, and every byte is compared.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.connector.modelless import BLOCK, STEP, Engine, Layers, run
from unit.connector.offload.test_modelless import (
    Recorder,
    Start,
    any_order,
    ask,
    chunk_blocks,
    computed,
    forget,
    half,
    prompt_of,
    start,
    tiers,
)
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventBatch, KVCacheEvent
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.request import Request

from disagg.connector.offload import setup
from disagg.connector.offload.groups import Chunks, Group
from disagg.connector.offload.scheduler import OffloadScheduler
from disagg.connector.offload.settings import OffloadSettings
from disagg.store.host_index import HostIndex
from disagg.vllm_compat.differences import LAST_STATE_IS_BEHIND_THE_PROMPT

pytestmark = pytest.mark.usefixtures("distributed")
__all__ = ["start"]

FULL = Layers()
CACHES = {
    "full and sliding": (FULL, Layers(window=2 * BLOCK)),
    "two sliding and full": (Layers(window=70), Layers(window=3), FULL),
    "full and local": (FULL, Layers(local=3 * BLOCK)),
    "sliding": (Layers(window=3 * BLOCK + 1),),
    "two full and sliding": (FULL, FULL, Layers(window=BLOCK + 1)),
    "states and full": (Layers(state=True), FULL, Layers(state=True)),
    "full, sliding and states": (FULL, Layers(window=2 * BLOCK), Layers(state=True)),
    "large full and small sliding": (Layers(block=2 * BLOCK), Layers(window=70)),
    "small full and large sliding": (FULL, Layers(window=3 * BLOCK, block=2 * BLOCK)),
}


# `make test` has half of them.
SOME_CACHES = pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow if at % 2 else ()) for at, one in enumerate(CACHES)],
)


def is_stateful(name: str) -> bool:
    return any(group.state for group in CACHES[name])


def loaded(engine: Engine, since: int) -> list[int]:
    """Blocks that were loaded from that step on, by group."""
    loads = [load for step in engine.scheduled[since:] for load in step.kv_connector_metadata.loads]
    return [
        sum(len(load.fillings[group].block_ids) for load in loads)
        for group in range(len(engine.groups))
    ]


# Each pair of values at least once; of each cache `make test` has one. Of state, chunks of several
# blocks are refused.
HOW = [("host", "LBHNC", 1), ("host", "BLHNC", 3), ("files", "LBHNC", 3), ("files", "BLHNC", 1)]


@pytest.mark.parametrize(
    ("name", "source", "layout", "per_chunk"),
    [
        pytest.param(name, *how, marks=pytest.mark.slow if (kind + number) % 4 else ())
        for kind, name in enumerate(CACHES)
        for number, how in enumerate(HOW)
    ],
)
def test_what_was_computed_is_loaded(
    start: Start, tmp_path: Path, name: str, source: str, per_chunk: int, layout: str
) -> None:
    if is_stateful(name):
        per_chunk = 1
    extra = {"directory": str(tmp_path)} if source == "files" else {}
    engine = start(layout=layout, blocks_per_chunk=per_chunk, groups=CACHES[name], **extra)
    for length in (7 * BLOCK + 5, 6 * BLOCK, 6 * BLOCK + 1):
        prompt = prompt_of(length, seed=length)
        ask(engine, prompt)
        forget(engine, host=source == "files")
        since = len(engine.scheduled)
        ask(engine, prompt)
        chunk = per_chunk * chunk_blocks(CACHES[name]) * BLOCK
        if LAST_STATE_IS_BEHIND_THE_PROMPT.here and is_stateful(name) and length % BLOCK == 0:
            # States are at the ends of whole steps; those that the last step leaves out may be
            # none at all.
            there = (length - 1) // STEP * STEP
            assert computed(engine, since) in (length - there + 2, length + 2)
            continue
        there = (length - 1) // chunk * chunk
        assert computed(engine, since) == length - there + 2


def test_only_what_the_window_needs_is_loaded(start: Start) -> None:
    """Also behind a beginning that the engine's own cache holds."""
    engine = start(groups=(FULL, Layers(window=2 * BLOCK)))
    prompt = prompt_of(9 * BLOCK + 3, seed=1)
    ask(engine, prompt)
    forget(engine)
    since = len(engine.scheduled)
    ask(engine, prompt)
    assert loaded(engine, since) == [9, 2]
    forget(engine)
    ask(engine, prompt[: 8 * BLOCK + 1], 1)
    since = len(engine.scheduled)
    ask(engine, prompt)
    assert loaded(engine, since) == [1, 1]


@SOME_CACHES
def test_the_next_turn(start: Start, name: str) -> None:
    """What was generated is found too, up to the last full block."""
    engine = start(groups=CACHES[name])
    prompt = prompt_of(2 * BLOCK + 20, seed=9)
    first = ask(engine, prompt, 3 * BLOCK)
    forget(engine)
    turn = [*prompt, *engine.answers[first], *prompt_of(10, seed=10)]
    since = len(engine.scheduled)
    ask(engine, turn)
    chunk = chunk_blocks(CACHES[name])
    assert computed(engine, since) == len(turn) - 5 // chunk * chunk * BLOCK + 2


@pytest.mark.parametrize("lost", [4, 5])
def test_a_hole_in_a_window_makes_the_prefix_shorter(
    start: Start, tmp_path: Path, lost: int
) -> None:
    engine = start(groups=(FULL, Layers(window=2 * BLOCK)), directory=str(tmp_path))
    prompt = prompt_of(6 * BLOCK + 3, seed=2)
    ask(engine, prompt)
    forget(engine, host=True)
    file_of(engine, tmp_path, prompt, 1, lost).unlink()
    engine = start(groups=engine.groups, directory=str(tmp_path))
    ask(engine, prompt)
    assert computed(engine, 0) == len(prompt) - lost * BLOCK + 2


def file_of(engine: Engine, root: Path, prompt: list[int], group: int, chunk: int) -> Path:
    request = Request("x", prompt, SamplingParams(), None, block_hasher=engine._hasher)
    (key,) = half(engine)._chunks.keys(request, group, chunk, chunk + 1)
    (file,) = root.rglob(f"{key.hex()}.*.safetensors")
    return file


@pytest.mark.parametrize(("group", "chunk"), [(0, 0), (0, 5), (1, 4), (1, 5)])
def test_what_cannot_be_read_is_computed(
    start: Start, tmp_path: Path, group: int, chunk: int
) -> None:
    engine = start(groups=(FULL, Layers(window=2 * BLOCK)), directory=str(tmp_path))
    prompt = prompt_of(6 * BLOCK + 3, seed=3)
    ask(engine, prompt)
    forget(engine, host=True)
    file = file_of(engine, tmp_path, prompt, group, chunk)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    since = len(engine.scheduled)
    ask(engine, prompt)
    assert computed(engine, since) == len(prompt) + 2
    run([engine], lambda: file.exists() and file.read_bytes() == whole)


class Whole(Recorder):
    """Keeps the events themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[KVCacheEvent] = []

    def publish(self, events: EventBatch) -> None:
        self.events += [event for event in events.events if event.medium == "CPU"]


def test_events_name_the_group(model: Path) -> None:
    engine = Engine(model, tiers(64), events=True, groups=(FULL, Layers(window=BLOCK)))
    publisher = engine.scheduler.kv_event_publisher = Whole()
    try:
        ask(engine, prompt_of(2 * BLOCK, seed=4), 1)
        half(engine)._host.clear()
        ask(engine, prompt_of(1, seed=5), 1)
    finally:
        engine.close()
    events = publisher.events
    stored = [(e.block_hashes[0], e.group_idx) for e in events if isinstance(e, BlockStored)]
    removed = [(e.block_hashes[0], e.group_idx) for e in events if isinstance(e, BlockRemoved)]
    assert sorted(stored) == sorted(removed)
    assert [group for _, group in stored] == [0, 1, 0, 1]
    assert len({hash_ for hash_, _ in stored}) == 2
    assert {len(bytes(hash_)) for hash_, _ in stored if isinstance(hash_, bytes)} == {32}


def test_caches_of_other_groups_are_kept_apart(start: Start) -> None:
    """One group has the names that it always had."""
    settings = OffloadSettings()

    def fields(*groups: Layers) -> dict[str, str]:
        engine = start(groups=groups)
        return dict(setup.fingerprint(settings, engine.config, engine.cache_config).fields)

    plain, one = fields(FULL), fields(FULL, Layers(window=64))
    assert plain["group"] == "2 FullAttentionSpec 4096"
    assert "groups" not in plain
    assert one.keys() - plain.keys() == {"groups"}
    assert plain.keys() - one.keys() == {"group"}
    others = [fields(FULL, Layers(window=65)), fields(Layers(window=64), FULL)]
    assert len({each["groups"] for each in (one, *others)}) == 3


@pytest.mark.parametrize("second_runner", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("way", ["allocated", "new", "cached", "zeroed", "copied"])
def test_blocks_of_any_group_are_copied_before_they_are_written(
    way: str, stateful: bool, second_runner: bool
) -> None:
    """Block 7, which a store has not copied yet, becomes one of the second group's.

    The second runner zeroes and copies blocks, and copies states into new ones, before it calls
    the connector: then it is too late to wait for the store.
    """
    second = Group(state=True) if stateful else Group(window=BLOCK)
    chunks, tables = Chunks([Group(), second], 1, BLOCK), ([5, 6], [0, 7])
    scheduler = OffloadScheduler(
        OffloadSettings(), HostIndex(4), None, chunks, world_size=1, second_runner=second_runner
    )
    scheduler._copying[7] = {3}
    if way == "allocated":
        blocks = tuple([SimpleNamespace(block_id=n, block_hash=None) for n in t] for t in tables)
        request: Any = SimpleNamespace(request_id="x")
        scheduler.after_alloc(request, SimpleNamespace(blocks=blocks), 0)  # type: ignore[arg-type]
    new = SimpleNamespace(block_ids=tables, num_computed_tokens=BLOCK)
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[new] if way == "new" else [],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, tables] * (way == "cached")),
        kv_cache_block_copies=[KVCacheBlockCopy(5, 7)] if way == "copied" else None,
        new_block_ids_to_zero=[7] if way == "zeroed" else None,
        kv_connector_block_state=None,
        num_scheduled_tokens={},
    )
    work = scheduler.step_work(output)
    first = second_runner and (way in ("zeroed", "copied") or (stateful and way != "allocated"))
    assert (work.flush, work.overwritten) == ((set(), {3: {7}}) if first else ({3}, {}))


def test_what_is_stored_twice_before_it_is_written_is_written_once(
    start: Start, tmp_path: Path
) -> None:
    """A disk that is behind, and a host tier that forgets meanwhile."""
    engine = start(8, groups=(FULL, Layers(window=BLOCK)), directory=str(tmp_path))
    prompt = prompt_of(BLOCK, seed=6)
    scheduler = half(engine)
    scheduler._writing = 8  # none may be begun

    def is_stored(engine: Engine, name: str) -> bool:
        return name in engine.finished and not scheduler.is_busy

    for _ in range(2):
        name = engine.add(prompt, 1, None)
        run([engine], partial(is_stored, engine, name))
        forget(engine, host=True)
    name = engine.add(prompt, 1, None)
    run([engine], lambda: name in engine.finished and not scheduler.is_busy)
    scheduler._writing = 0
    ask(engine, prompt_of(BLOCK, seed=7), 1)
    assert scheduler._shared is not None
    assert scheduler._shared.stats.stored == 4


@SOME_CACHES
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_order(start: Start, tmp_path: Path, name: str, seed: int) -> None:
    eviction, groups = ["lru", "arc", "turns"][seed % 3], CACHES[name]
    # Of fewer blocks, two loaded requests could wait for each other's: of those that wait to be
    # scheduled, vLLM 0.32 counts null blocks as if they were held.
    any_order(start, tmp_path, seed, eviction, groups, slots=14, blocks=44)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("seed", range(100, 160))
def test_any_order_often(start: Start, tmp_path: Path, name: str, seed: int) -> None:
    """What goes wrong once in some hundred times is found here."""
    test_any_order(start, tmp_path, name, seed)
