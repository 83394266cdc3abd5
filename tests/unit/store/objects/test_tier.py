"""Chunks in a real server: what was written is read, anything else is a miss, an outage is too."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors
from object_servers import Server, running_mooncake, running_s3, running_valkey
from unit.store.chunks import (
    FINGERPRINT,
    GARBAGE,
    NUM_BYTES,
    SPEC,
    content_of,
    cut,
    empty,
    key_of,
    open_directory,
    path_of,
)
from unit.store.objects.conftest import Stores, content, name_of, needs_mooncake, replace

from disagg.checksums import Checksum
from disagg.errors import ConfigError
from disagg.store.base import FileStats, ReadOutcome, ReadResult, WriteOutcome, WriteResult
from disagg.store.fingerprint import Fingerprint
from disagg.store.objects.base import StoreError
from disagg.store.objects.guard import Breaker, GuardedStore
from disagg.store.objects.mooncake import MooncakeStore
from disagg.store.objects.tier import ObjectFinder, Objects
from disagg.testing.waiting import eventually

KEY = key_of(1)
NAME = name_of(KEY)
OTHER_SEED = Fingerprint(FINGERPRINT.fields, {"hash_algorithm": "sha256", "hash_seed": "b2"})


def write(tier: Objects, key: bytes = KEY, rank: int = 0) -> WriteResult:
    return tier.write(key, cut(content_of(key, rank)))


def read(tier: Objects, key: bytes = KEY) -> tuple[ReadResult, bytes]:
    memory, buffers = empty()
    return tier.read(key, buffers), bytes(memory)


def test_what_was_written_is_read(stores: Stores) -> None:
    tier = stores.tier()
    result = write(tier)
    assert result.outcome is WriteOutcome.WRITTEN
    assert read(tier) == (ReadResult(ReadOutcome.LOADED, NUM_BYTES), content_of(KEY))
    expected = FileStats(written=1, loaded=1, bytes_written=result.num_bytes, bytes_read=NUM_BYTES)
    assert tier.stats == expected
    assert write(stores.tier()) == WriteResult(WriteOutcome.EXISTED)


def test_an_object_is_what_the_directory_s_file_is(stores: Stores, tmp_path: Path) -> None:
    write(stores.tier())
    write(open_directory(tmp_path))  # type: ignore[arg-type]
    stored = content(stores.open(), NAME)
    assert stored == path_of(tmp_path, KEY).read_bytes()
    assert sorted(name for name, _ in safetensors.deserialize(stored)) == ["k", "v"]


def test_what_is_not_there(stores: Stores) -> None:
    tier = stores.tier()
    missing = ReadResult(ReadOutcome.MISSING, reason="missing")
    assert read(tier) == (missing, GARBAGE * NUM_BYTES)
    assert tier.stats == FileStats(missing=1)


def test_ranks_fingerprints_and_secrets_are_apart(stores: Stores) -> None:
    write(stores.tier())
    assert read(stores.tier(rank=1))[0].outcome is ReadOutcome.MISSING
    other = Fingerprint({**FINGERPRINT.fields, "dtype": "float16"}, FINGERPRINT.hashing)
    assert read(Objects(stores.open(), other, 0, SPEC))[0].outcome is ReadOutcome.MISSING
    keyed = stores.tier(checksum=Checksum.named("keyed", b"test", b"a secret of theirs"))
    assert read(keyed)[0] == ReadResult(ReadOutcome.DAMAGED, reason="content")


def test_another_hash_seed_is_refused(stores: Stores) -> None:
    write(stores.tier())
    with pytest.raises(ConfigError, match="hash_seed"):
        Objects(stores.open(), OTHER_SEED, 0, SPEC)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        ObjectFinder(stores.open(), OTHER_SEED, 1)


def test_damaged_and_foreign_objects_are_misses_and_removed(stores: Stores) -> None:
    """Of random damage, never one byte is taken for right."""
    store, tier = stores.open(), stores.tier()
    write(tier)
    good = content(store, NAME)
    assert good is not None
    write(tier, key_of(2))
    write(stores.tier(1), rank=1)
    other = stores.tier(checksum=Checksum(b"k" * 32))
    store.remove([NAME])
    write(other)
    foreign = [content(store, name) for name in (name_of(key_of(2)), name_of(KEY, 1), NAME)]
    chosen = random.Random(3)
    for number in range(24):
        bad = bytearray(good)
        match number % 4:
            case 0:
                bad[chosen.randrange(len(bad))] ^= 1 << chosen.randrange(8)
            case 1:
                del bad[chosen.randrange(1, len(bad)) :]
            case 2:
                bad += chosen.randbytes(chosen.randrange(1, 5000))
            case _:
                begin = chosen.randrange(len(bad))
                bad[begin:] = chosen.randbytes(len(bad) - begin)
        foreign.append(bytes(bad))
    for bad_one in foreign:
        assert bad_one is not None
        replace(store, NAME, bad_one)
        result, _ = read(tier)
        assert result.outcome is ReadOutcome.DAMAGED
        assert result.reason in ("size", "content")
        assert store.sizes([NAME]) == [None]
    assert tier.stats.damaged == len(foreign)
    assert write(tier).outcome is WriteOutcome.WRITTEN
    assert read(tier)[1] == content_of(KEY)


def test_what_is_there_is_written_again_only_if_its_size_is_wrong(stores: Stores) -> None:
    store, tier = stores.open(), stores.tier()
    size = write(tier).num_bytes
    replace(store, NAME, bytes(size))
    assert write(tier).outcome is WriteOutcome.EXISTED
    assert content(store, NAME) == bytes(size)
    replace(store, NAME, b"short")
    assert write(tier).outcome is WriteOutcome.WRITTEN
    assert read(tier)[0].ok


def test_two_writers_and_readers_of_the_same_keys(stores: Stores) -> None:
    tiers = [stores.tier() for _ in range(2)]
    keys = [key_of(number) for number in range(6)]

    def work(number: int) -> None:
        tier, order = tiers[number % 2], random.Random(number)
        for key in order.sample(keys, len(keys)):
            assert write(tier, key).ok
            result, found = read(tier, key)
            assert result.ok
            assert found == content_of(key)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(4))] == [None] * 4


def test_the_finder_stops_at_the_first_gap(stores: Stores) -> None:
    tiers = [stores.tier(rank) for rank in range(2)]
    keys = [key_of(number) for number in range(60)]
    for key in (*keys[:45], *keys[50:]):
        for rank, tier in enumerate(tiers):
            assert write(tier, key, rank).ok
    finder = ObjectFinder(stores.open(), FINGERPRINT, 2)
    assert finder.leading(keys) == 45
    assert finder.leading(keys[50:]) == 10
    assert finder.leading([]) == 0
    stores.open().remove([name_of(keys[7], 1)])
    assert finder.leading(keys) == 7
    assert ObjectFinder(stores.open(), FINGERPRINT, 1).leading(keys) == 45


def test_callers_mistakes_are_errors(stores: Stores) -> None:
    tier = stores.tier()
    for key, buffers in ((KEY, [memoryview(b"short")]), (b"", cut(content_of(KEY)))):
        with pytest.raises(ValueError, match="bytes"):
            tier.write(key, buffers)
        with pytest.raises(ValueError, match="bytes"):
            tier.read(key, buffers)


# ---- outages ---------------------------------------------------------------------------------


@needs_mooncake
def test_an_outage_of_mooncake_is_a_miss_and_ends(tmp_path: Path) -> None:
    """All of it is killed, and started again; the master is stopped; who lent the memory dies."""
    with running_mooncake(tmp_path / "log") as server:
        own = Stores("mooncake", server)
        guarded = GuardedStore(own.open(timeout_s=0.5), Breaker("store", failures=2, pause_s=0.01))
        tier = own.tier(store=guarded)
        assert write(tier).ok
        server.kill()
        for _ in range(3):
            assert read(tier)[0].outcome is ReadOutcome.FAILED
            assert write(tier, key_of(2)).outcome is WriteOutcome.FAILED
        assert guarded.breaker.is_open
        server.start()
        assert eventually(lambda: write(tier).ok, 60)
        assert read(tier)[1] == content_of(KEY)
        with server.stopped():
            assert read(tier)[0] == ReadResult(ReadOutcome.FAILED, reason="timeout")
        assert eventually(lambda: read(tier)[1] == content_of(KEY), 60)
        server.kill_lender()
        assert read(tier)[0].outcome in (ReadOutcome.MISSING, ReadOutcome.FAILED)
        assert not write(tier, key_of(3)).ok
        own.close()


@needs_mooncake
def test_a_size_of_mooncake_s_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_LOCAL_BUFFER_SIZE", "1GB")
    with pytest.raises(ConfigError, match=r"MOONCAKE_LOCAL_BUFFER_SIZE: '1GB' — is no number"):
        MooncakeStore("127.0.0.1:1", "p", "mooncake")


@needs_mooncake
def test_a_full_mooncake_store_says_so(mooncake_server: Server) -> None:
    store = Stores("mooncake", mooncake_server).open()
    piece = memoryview(bytes(32 << 20))

    def fill() -> None:
        for number in range(20):
            store.put(f"large/{number}", [piece])

    with pytest.raises(StoreError) as caught:
        fill()
    assert caught.value.reason == "full"
    store.remove([f"large/{number}" for number in range(20)])
    store.close()


@pytest.fixture(params=["valkey", "s3"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """A server of this test's alone, which it may kill."""
    running = running_valkey if request.param == "valkey" else running_s3
    server: Server = request.getfixturevalue("exits").enter_context(running(tmp_path / "log"))
    return Stores(request.param, server)


def test_an_outage_is_a_miss_and_ends(own: Stores) -> None:
    """Killed, and started again (empty); then stopped, so that it only does not answer."""
    guarded = GuardedStore(own.open(timeout_s=0.5), Breaker("store", failures=2, pause_s=0.01))
    tier = own.tier(store=guarded)
    finder = ObjectFinder(guarded, FINGERPRINT, 1)
    assert write(tier).ok
    own.server.kill()
    for _ in range(3):
        assert read(tier)[0] == ReadResult(ReadOutcome.FAILED, reason="unreachable")
        assert write(tier, key_of(2)).reason == "unreachable"
        with pytest.raises(OSError, match=r"does not answer|refused|sending request"):
            finder.leading([KEY])
    assert guarded.breaker.is_open
    own.server.start()
    wait_until_back(tier)
    assert read(tier)[0].outcome is ReadOutcome.MISSING
    assert write(tier).outcome is WriteOutcome.WRITTEN
    with own.server.stopped():
        assert read(tier)[0] == ReadResult(ReadOutcome.FAILED, reason="timeout")
        assert read(tier)[0].reason == "timeout"
        assert guarded.breaker.is_open
    wait_until_back(tier)
    assert read(tier)[1] == content_of(KEY)
    assert finder.leading([KEY]) == 1


def wait_until_back(tier: Objects) -> None:
    assert eventually(lambda: read(tier, key_of(99))[0].outcome is ReadOutcome.MISSING)


def test_an_engine_starts_without_its_store(own: Stores, caplog: pytest.LogCaptureFixture) -> None:
    own.server.kill()
    tier = own.tier(store=own.open(timeout_s=0.5))
    assert "is out at start (unreachable" in caplog.text
    assert write(tier).reason == "unreachable"
    own.server.start()
    assert write(tier).ok
    assert read(tier)[0].ok
    with pytest.raises(ConfigError, match="hash_seed"):
        Objects(own.open(), OTHER_SEED, 0, SPEC)


def test_an_engine_that_claims_too_late_writes_nothing(own: Stores) -> None:
    own.server.kill()
    late = Objects(own.open(timeout_s=0.5), OTHER_SEED, 0, SPEC)
    own.server.start()
    tier = own.tier()
    assert late.write(KEY, cut(content_of(KEY))).reason == "hashing"
    assert late.write(KEY, cut(content_of(KEY))).reason == "hashing"
    assert read(tier)[0].outcome is ReadOutcome.MISSING
