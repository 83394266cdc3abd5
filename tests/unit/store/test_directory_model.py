"""Directory and index together: any order of stores, loads, damage and evictions, against a
model that knows which rank's file is there and whether it is whole."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unit.store.chunks import FINGERPRINT, content_of, cut, empty, key_of, open_directory, path_of

from disagg.store.base import EventKind, Leading, Presence, ReadOutcome, WriteOutcome
from disagg.store.directory import DirectoryFinder
from disagg.store.directory_space import DirectorySpace
from disagg.store.shared_index import FindingsLimits, SharedIndex

RANKS = 2
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
KEYS = [key_of(number) for number in range(6)]
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)


class AnyOrder(RuleBasedStateMachine):
    """The model: for each key and rank None, True (whole) or False (damaged, of the right size)."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store", dir=MEMORY))
        self.now = 0.0
        self.index = SharedIndex(
            DirectoryFinder(self.root, FINGERPRINT, RANKS),
            FindingsLimits(10, 1, 1e9),
            clock=lambda: self.now,
        )
        self.space = DirectorySpace(self.root, 1 << 40)
        self.workers = [open_directory(self.root, rank) for rank in range(RANKS)]
        self.disk: dict[tuple[bytes, int], bool] = {}
        self.storing: list[bytes] = []
        self.loading: list[bytes] = []
        self.damaged = self.prepared = self.begun = self.ended = 0

    def on_disk(self, key: bytes) -> bool:
        return all((key, rank) in self.disk for rank in range(RANKS))

    @rule(keys=SOME)
    def prepare(self, keys: list[bytes]) -> None:
        chosen = self.index.prepare_store(keys)
        assert not {*self.storing, *self.loading} & set(chosen), "in flight already"
        self.storing += chosen
        self.prepared += len(chosen)

    @initialize(keys=SOME)
    def begin_with(self, keys: list[bytes]) -> None:
        self.write(keys)

    @rule(keys=SOME)
    def write(self, keys: list[bytes]) -> None:
        """As another engine does, without a word to this one."""
        for key in keys:
            for rank, worker in enumerate(self.workers):
                assert worker.write(key, cut(content_of(key, rank))).ok
                self.disk.setdefault((key, rank), True)

    @precondition(lambda self: self.storing)
    @rule(data=st.data(), fails=st.sampled_from([None, None, None, 0, 1]))
    def store(self, data: st.DataObject, fails: int | None) -> None:
        """Every rank writes; one of them may be hindered."""
        key = data.draw(st.sampled_from(self.storing))
        for rank, worker in enumerate(self.workers):
            if rank == fails:
                continue
            outcome = worker.write(key, cut(content_of(key, rank))).outcome
            existed = (key, rank) in self.disk
            assert outcome is (WriteOutcome.EXISTED if existed else WriteOutcome.WRITTEN)
            self.disk.setdefault((key, rank), True)
        self.index.complete_store([key], fails is None)
        self.storing.remove(key)
        stored = [event.key for event in self.index.take_events()]
        assert stored == ([key] if fails is None else [])

    @rule(keys=SOME)
    def begin(self, keys: list[bytes]) -> None:
        chosen = self.index.begin_load(keys)
        assert chosen == keys[: len(chosen)]
        assert not {*self.storing, *self.loading} & set(chosen), "in flight already"
        self.loading += chosen
        self.begun += len(chosen)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load_one(self, data: st.DataObject) -> None:
        self.load(data.draw(st.sampled_from(self.loading)))

    @precondition(lambda self: self.disk)
    @rule(data=st.data(), harm=st.sampled_from(["none", "damage", "evict"]))
    def find_and_load(self, data: st.DataObject, harm: str) -> None:
        """A load as it goes as a rule, and what may happen after it was begun."""
        key, rank = data.draw(st.sampled_from(sorted(self.disk)))
        if key in self.storing or key in self.loading:
            return
        self.look_anew([key])
        self.begin([key])
        if harm == "damage" and self.disk[key, rank]:
            self.damage_file(key, rank, data.draw(st.integers(0, 10_000)))
        if harm == "evict":
            self.evict_chunk(key)
        if key in self.loading:
            self.load(key)

    def load(self, key: bytes) -> None:
        good = True
        for rank, worker in enumerate(self.workers):
            memory, buffers = empty()
            result = worker.read(key, buffers)
            state = self.disk.get((key, rank))
            assert result.outcome is {
                None: ReadOutcome.MISSING, True: ReadOutcome.LOADED, False: ReadOutcome.DAMAGED,
            }[state]  # fmt: skip
            if result.ok:
                assert memory == content_of(key, rank), "a wrong chunk"
            if state is False:
                self.damaged += 1
                del self.disk[key, rank]
                assert not path_of(self.root, key, rank).exists()
            good &= result.ok
        self.index.end_load([key], good)
        self.loading.remove(key)
        self.ended += 1
        if not good:
            assert self.index.lookup(key) is Presence.MISS
            events = self.index.take_events()
            assert [(event.kind, event.key) for event in events] == [(EventKind.REMOVED, key)]

    @precondition(lambda self: self.disk)
    @rule(data=st.data(), at=st.integers(0, 10_000))
    def damage(self, data: st.DataObject, at: int) -> None:
        key, rank = data.draw(st.sampled_from(sorted(self.disk)))
        if self.disk[key, rank]:
            self.damage_file(key, rank, at)

    def damage_file(self, key: bytes, rank: int, at: int) -> None:
        path = path_of(self.root, key, rank)
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 0x10
        path.write_bytes(content)
        self.disk[key, rank] = False

    @precondition(lambda self: self.disk)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """As any engine may, without a word to this one."""
        self.evict_chunk(data.draw(st.sampled_from(sorted(self.disk)))[0])

    def evict_chunk(self, key: bytes) -> None:
        for rank in range(RANKS):
            path_of(self.root, key, rank).unlink(missing_ok=True)
            self.disk.pop((key, rank), None)

    @rule(seconds=st.sampled_from([0.5, 2, 20]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(keys=SOME)
    def look(self, keys: list[bytes]) -> None:
        self.index.leading(keys)
        self.settle()

    def settle(self) -> None:
        """Wait for all answers: what the next step does must not depend on threads."""
        deadline = time.monotonic() + 10
        while self.index._questions:
            assert time.monotonic() < deadline
            time.sleep(0.0002)
            self.index.leading([])

    @rule(keys=SOME)
    def look_anew(self, keys: list[bytes]) -> None:
        """When nothing is remembered, the answer is the disk's."""
        self.index.clear()
        busy = {*self.storing, *self.loading}
        for _ in keys:  # one question reaches as far as the first key that is in flight
            leading = self.index.leading(keys)
            self.settle()
        leading = self.index.leading(keys)
        expected = 0
        while expected < len(keys) and keys[expected] not in busy and self.on_disk(keys[expected]):
            expected += 1
        later = expected < len(keys) and keys[expected] in busy
        assert leading == Leading(expected, later)

    @rule()
    def make_room(self) -> None:
        """Nothing is too much here, so nothing goes."""
        assert self.space.make_room()[:2] == (0, 0)

    @rule()
    def restart(self) -> None:
        """A worker begins anew with what is on the disk."""
        assert sum(worker.stats.damaged for worker in self.workers) == self.damaged
        self.damaged = 0
        self.workers = [open_directory(self.root, rank) for rank in range(RANKS)]

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity()
        stats = self.index.stats
        assert stats.stored + stats.stores_failed == self.prepared - len(self.storing)
        assert self.ended == self.begun - len(self.loading)
        assert stats.in_use == len(self.storing) + len(self.loading)
        assert stats.stray == 0
        assert sum(worker.stats.damaged for worker in self.workers) == self.damaged

    def teardown(self) -> None:
        self.index.close()
        self.space.close()
        shutil.rmtree(self.root)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
