"""What Valkey alone has: lifetimes, a limit of its own, users, and values of other types."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from object_servers import ValkeyServer, running_valkey
from unit.store.chunks import FINGERPRINT, SPEC, content_of, cut, empty, key_of
from unit.store.objects.conftest import Stores, name_of, replace

from disagg.store.base import ReadOutcome
from disagg.store.objects.base import StoreError
from disagg.store.objects.resp import Address, Connection
from disagg.store.objects.tier import Objects
from disagg.store.objects.valkey import ValkeyStore

KEY = key_of(1)


def commands(server: ValkeyServer, *parts: str) -> object:
    """One command of an administrator's."""
    connection = Connection(Address("127.0.0.1", server.port))
    with contextlib.closing(connection):
        return connection.call([[part.encode() for part in parts]], 10)[0]


def lifetime_ms(stores: Stores, name: str) -> int:
    found = commands(stores.server, "PTTL", f"{stores.prefix}/{name}")  # type: ignore[arg-type]
    assert isinstance(found, int)
    return found


def test_a_lifetime_is_renewed_by_use(valkey: Stores) -> None:
    tier = valkey.tier(store=valkey.open(ttl_s=1000), ttl_s=1000)
    name = name_of(KEY)
    assert tier.write(KEY, cut(content_of(KEY))).ok
    assert 900_000 < lifetime_ms(valkey, name) <= 1000_000
    key = f"{valkey.prefix}/{name}"
    for use in (
        lambda tier: tier.read(KEY, empty()[1]),
        lambda tier: tier.touch([KEY, key_of(5)]),
        lambda tier: tier.write(KEY, cut(content_of(KEY))),
    ):
        commands(valkey.server, "PEXPIRE", key, "5000")  # type: ignore[arg-type]
        another = valkey.tier(store=valkey.open(ttl_s=1000), ttl_s=1000)
        use(another)
        assert lifetime_ms(valkey, name) > 900_000
        commands(valkey.server, "PEXPIRE", key, "5000")  # type: ignore[arg-type]
        use(another)
        assert lifetime_ms(valkey, name) <= 5000, "at most once a minute"
    assert lifetime_ms(valkey, f"{FINGERPRINT.namespace}/fingerprint.json") == -1


def test_what_has_lived_is_a_miss(valkey: Stores) -> None:
    tier = valkey.tier(store=valkey.open(ttl_s=0.05), ttl_s=0.05)
    assert tier.write(KEY, cut(content_of(KEY))).ok
    time.sleep(0.2)
    assert tier.read(KEY, empty()[1]).outcome is ReadOutcome.MISSING


def test_a_value_of_another_type_is_damaged(valkey: Stores) -> None:
    tier, name = valkey.tier(), name_of(KEY)
    commands(valkey.server, "HSET", f"{valkey.prefix}/{name}", "a", "b")  # type: ignore[arg-type]
    assert valkey.open().sizes([name]) == [-1]
    assert tier.read(KEY, empty()[1]).outcome is ReadOutcome.DAMAGED
    commands(valkey.server, "HSET", f"{valkey.prefix}/{name}", "a", "b")  # type: ignore[arg-type]
    assert tier.write(KEY, cut(content_of(KEY))).ok
    assert tier.read(KEY, empty()[1]).ok


def test_an_empty_value_is_a_miss_that_is_written_again(valkey: Stores) -> None:
    tier = valkey.tier()
    replace(valkey.open(), name_of(KEY), b"")
    assert tier.read(KEY, empty()[1]).outcome is ReadOutcome.MISSING
    assert tier.write(KEY, cut(content_of(KEY))).ok
    assert tier.read(KEY, empty()[1]).ok


def test_a_full_server(tmp_path: Path) -> None:
    with running_valkey(tmp_path / "log", "--maxmemory", "1500kb") as server:
        store = ValkeyStore(Address("127.0.0.1", server.port), "x", "there")
        assert store.unlimited() == "maxmemory-policy is noeviction"
        tier = Objects(store, FINGERPRINT, 0, SPEC)
        results = [tier.write(key_of(n), cut(content_of(key_of(n)))) for n in range(1000)]
        assert results[0].ok
        assert {result.reason for result in results} == {"", "full"}
        commands(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        assert tier.write(key_of(2000), cut(content_of(key_of(2000)))).ok
        assert store.unlimited() == ""
        commands(server, "CONFIG", "SET", "maxmemory", "0")
        assert store.unlimited() == "maxmemory is not set"


def test_a_user_of_the_commands_that_are_needed(tmp_path: Path) -> None:
    """Those that docs/tiers.md names; and without its password nothing."""
    with running_valkey(tmp_path / "log") as server:
        allowed = "+getrange +set +strlen +unlink +touch +pexpire +select +info"
        acl = ("ACL", "SETUSER", "kv", "on", ">word word", "~kv/*", *allowed.split())
        commands(server, *acl)
        commands(server, "ACL", "SETUSER", "default", "off")
        for ttl_s in (None, 100.0):
            address = Address("127.0.0.1", server.port, 1, "kv", "word word")
            store = ValkeyStore(address, "kv", "there", ttl_s=ttl_s)
            tier = Objects(store, FINGERPRINT, 0, SPEC)
            assert tier.write(KEY, cut(content_of(KEY))).ok
            tier.touch([KEY])
            store.touch([name_of(KEY)])
            assert tier.read(KEY, empty()[1]).ok
            assert store.unlimited() == "maxmemory is not set"
            store.remove([name_of(KEY)])
        for user, password in (("", ""), ("kv", "wrong"), ("", "word word")):
            wrong = ValkeyStore(Address("127.0.0.1", server.port, 1, user, password), "kv", "there")
            with pytest.raises(StoreError) as caught:
                wrong.sizes(["a"])
            assert caught.value.reason == "denied"
            assert "word word" not in f"{caught.value} {wrong._address!r}"


def test_connections_are_used_again_and_new_after_a_restart(valkey: Stores) -> None:
    store = valkey.open()
    assert isinstance(store, ValkeyStore)
    store.sizes(["a"])
    (first,) = store._idle
    store.sizes(["a"])
    assert store._idle == [first]
    commands(valkey.server, "CLIENT", "KILL", "TYPE", "normal")  # type: ignore[arg-type]
    assert store.sizes(["a"]) == [None]
    assert store._idle != [first]


def test_a_listing_is_not_supported(valkey: Stores) -> None:
    with pytest.raises(StoreError, match="limits its size itself"):
        valkey.open().entries()
