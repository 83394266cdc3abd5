"""What is loaded and stored of several KV cache groups, against vLLM's own rule of what is kept."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.connector.modelless import BLOCK, Layers
from unit.store.chunks import FINGERPRINT
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec

from disagg.connector.kv_cache_layout import NULL_BLOCK
from disagg.connector.offload.groups import Chunks, Group
from disagg.connector.offload.matching import Match, Matcher
from disagg.store.base import Key
from disagg.store.directory import DirectoryFinder
from disagg.store.directory_files import file_name
from disagg.store.fingerprint import claim
from disagg.store.host_index import HostIndex
from disagg.store.shared_index import SharedIndex

GROUPS = st.one_of(
    st.just(Group()),
    st.builds(Group, window=st.integers(1, 5 * BLOCK)),
    st.builds(Group, local=st.integers(1, 5).map(lambda blocks: blocks * BLOCK)),
)
SALTS = itertools.count(1)


def kept_by_vllm(group: Group, computed: int) -> int:
    """The first block that is not the null block."""
    manager = get_manager_for_kv_cache_spec(
        Layers(group.window, group.local).spec(),
        max_in_flight_tokens=BLOCK,
        max_model_len=4096,
        block_pool=BlockPool(4, True, BLOCK),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
    )
    return int(manager.get_num_skipped_tokens(computed)) // BLOCK


@given(GROUPS, st.integers(0, 4096))
def test_blocks_that_vllm_keeps(group: Group, computed: int) -> None:
    assert group.skipped(computed) // BLOCK == kept_by_vllm(group, computed)


# ---- matching --------------------------------------------------------------------------------


@dataclass
class Prompt:
    """As much of a request as a match looks at."""

    num_tokens: int
    salt: int = field(default_factory=lambda: next(SALTS))
    lora_request: LoRARequest | None = None

    @property
    def block_hashes(self) -> list[bytes]:
        blocks = range(self.num_tokens // BLOCK)
        return [self.salt.to_bytes(16, "big") + block.to_bytes(16, "big") for block in blocks]


@dataclass
class Case:
    """host, files: chunks that are there, as (group, number)."""

    groups: list[Group]
    per: int
    prompt: Prompt
    computed: int
    host: set[tuple[int, int]]
    files: set[tuple[int, int]]
    spare: int

    @property
    def chunks(self) -> Chunks:
        return Chunks(self.groups, self.per, BLOCK)

    def key(self, group: int, number: int) -> Key:
        (key,) = self.chunks.keys(self.prompt, group, number, number + 1)  # type: ignore[arg-type]
        return key

    def needed(self, stop: int) -> set[tuple[int, int]]:
        """The chunks of blocks that vLLM keeps, of those that its own cache does not hold."""
        blocks = stop * self.per
        return {
            (number, block // self.per)
            for number, group in enumerate(self.groups)
            for block in range(self.computed // BLOCK, blocks)
            if block >= kept_by_vllm(group, blocks * BLOCK)
        }

    def best(self, room: int) -> int:
        """The longest prefix that can be loaded; 0: nothing can."""
        most = self.prompt.num_tokens - any(not group.sees_all for group in self.groups)
        for stop in range(most // (self.per * BLOCK), self.computed // (self.per * BLOCK), -1):
            needed = self.needed(stop)
            fits = len(needed) <= room or needed <= self.host
            if needed <= self.host | self.files and fits:
                return stop
        return 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.lists(GROUPS, min_size=1, max_size=3))
    per = draw(st.sampled_from([1, 2, 3]))
    prompt = Prompt(draw(st.integers(1, 14 * BLOCK)))
    every = [
        (group, number)
        for group in range(len(groups))
        for number in range(prompt.num_tokens // (per * BLOCK))
    ]
    # Most are there, as gaps at each place would leave nothing to be found.
    gaps = st.sets(st.sampled_from(every), max_size=4) if every else st.just(set())
    not_there = draw(gaps)
    host = draw(st.sets(st.sampled_from(every))) if every else set()
    computed = draw(st.integers(0, max(0, prompt.num_tokens - 1) // BLOCK)) * BLOCK
    there = {*every} - not_there
    return Case(groups, per, prompt, computed, host & there, there - host, draw(st.integers(0, 9)))


@dataclass
class Disk:
    index: SharedIndex
    folder: Path

    def write(self, keys: Sequence[Key]) -> None:
        for key in keys:
            path = self.folder / file_name(key, 0)
            path.parent.mkdir(exist_ok=True)
            path.touch()


@pytest.fixture(scope="module")
def disk() -> Iterator[Disk]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="match", dir=memory) as root:
        index = SharedIndex(DirectoryFinder(Path(root), FINGERPRINT, 1))
        yield Disk(index, claim(Path(root), FINGERPRINT).path)
        index.close()


def filled(keys: Sequence[Key], spare: int) -> HostIndex:
    host = HostIndex(max(1, len(keys) + spare))
    host.complete_store(host.prepare_store(keys), True)
    return host


def found(matcher: Matcher, case: Case) -> Match:
    deadline, request = time.monotonic() + 10, case.prompt
    while True:
        match, later = matcher.find(request, case.computed)  # type: ignore[arg-type]
        if not later:
            return match
        assert time.monotonic() < deadline


def check(case: Case, match: Match, room: int) -> None:
    best = case.best(room)
    if not best:
        assert not match.keys
        return
    assert match.stop == best
    needed = {(part.group, part.first + n) for part in match.parts for n in range(len(part.keys))}
    assert needed == case.needed(best)
    assert match.keys == [case.key(*one) for one in sorted(needed)]
    assert match.in_shared == {case.key(*one) for one in needed & case.files}


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_longest_prefix_in_host_memory(case: Case) -> None:
    case.host, case.files = case.host | case.files, set()
    host = filled([case.key(*one) for one in case.host], case.spare)
    check(case, found(Matcher(host, None, case.chunks), case), 1000)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_longest_prefix_over_both_tiers(disk: Disk, case: Case) -> None:
    """Read from files is what slots can be had for."""
    host = filled([case.key(*one) for one in case.host], case.spare)
    disk.write([case.key(*one) for one in case.files])
    room = host.stats.capacity
    check(case, found(Matcher(host, disk.index, case.chunks), case), room)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_what_is_being_written_is_waited_for(case: Case, data: st.DataObject) -> None:
    """Without it, the answer is what can be loaded already."""
    every = sorted(case.host | case.files)
    case.files = {*data.draw(st.sets(st.sampled_from(every)))} if every else set()
    case.host = {*every} - case.files
    host = HostIndex(64)
    host.prepare_store([case.key(*one) for one in case.files])
    host.complete_store(host.prepare_store([case.key(*one) for one in case.host]), True)
    match, later = Matcher(host, None, case.chunks).find(case.prompt, case.computed)  # type: ignore[arg-type]
    more = case.best(1000)
    case.files = set()
    check(case, match, 1000)
    assert later or case.best(1000) == more


# ---- storing ---------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_what_is_stored_serves_every_load(case: Case, data: st.DataObject) -> None:
    """Whatever vLLM has given back: what is stored is whole as far as a load may want it, and all
    is stored that a load up to there could use."""
    tokens = data.draw(st.integers(0, case.prompt.num_tokens))
    blocks, ids = tokens // BLOCK, itertools.count(1)
    tables = [[next(ids) for _ in range(blocks)] for _ in case.groups]
    for table in tables:
        gone = data.draw(st.integers(0, blocks))
        table[:gone] = [NULL_BLOCK] * gone
    first = data.draw(st.integers(0, 2))
    request: Any = case.prompt
    stop, stored = case.chunks.filled(request, first, tokens, tables)
    assert stop == max(first, blocks // case.per)
    for number, group in itertools.product(range(first, stop), range(len(case.groups))):
        begin, end = number * case.per, (number + 1) * case.per
        there = stored.pop(case.key(group, number), None)
        last = kept_by_vllm(case.groups[group], end * BLOCK)
        if there is None:
            assert last >= end or NULL_BLOCK in tables[group][max(begin, last) : end]
            continue
        for later in range(end, end + 4 * case.per, case.per):
            wanted = max(begin, kept_by_vllm(case.groups[group], later * BLOCK))
            assert NULL_BLOCK not in there[wanted - begin :]
            assert there[wanted - begin :] == tables[group][wanted:end]
        assert sorted(there, key=bool) == there, "the null block elsewhere than at the beginning"
    assert not stored


# ---- names -----------------------------------------------------------------------------------


def test_the_key_of_one_group_is_the_hash() -> None:
    prompt: Any = Prompt(5 * BLOCK)
    for groups, suffix in (([Group()], b""), ([Group(), Group(window=3)], b"\0\0\0\1")):
        chunks = Chunks(groups, 2, BLOCK)
        keys = chunks.keys(prompt, len(groups) - 1, 0, 9)
        assert keys == [prompt.block_hashes[n] + suffix for n in (1, 3)]
        assert chunks.split_key(keys[0])[0] == prompt.block_hashes[1]
        assert chunks.split_key(keys[0])[1] == (1 if suffix else None)


def test_the_key_says_which_weights_an_adapter_has(tmp_path: Path) -> None:
    """The same hash, as vLLM knows names and paths alone."""
    prompt: Any = Prompt(2 * BLOCK)
    plain, seen = Chunks([Group()], 1, BLOCK).keys(prompt, 0, 0, 2), set[Key]()
    prompt.lora_request = LoRARequest("mine", 1, str(tmp_path))
    for weights in (b"old", b"new"):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        for groups in ([Group()], [Group(), Group(window=3)]):
            chunks = Chunks(groups, 1, BLOCK)
            keys = chunks.keys(prompt, len(groups) - 1, 0, 2)
            split = [chunks.split_key(key) for key in keys]
            assert split == [(key, 1 if len(groups) > 1 else None) for key in plain]
            seen.update(keys)
    assert len({*plain} | seen) == 10


def test_of_windows_only_the_last_chunks_are_kept_in_use() -> None:
    prompt: Any = Prompt(6 * BLOCK)
    chunks = Chunks([Group(), Group(window=BLOCK + 1)], 1, BLOCK)
    full, sliding = (chunks.keys(prompt, group, 0, 6) for group in (0, 1))
    assert chunks.needed(prompt, 4) == [*full[:3], full[3], sliding[3]]
