"""Real servers of object stores, and the tier over each of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from object_servers import (
    BUCKET,
    Server,
    has_mooncake,
    running_mooncake,
    running_s3,
    running_valkey,
)
from unit.store.chunks import FINGERPRINT, SPEC

from disagg.store.directory_files import file_name
from disagg.store.objects.base import ObjectStore
from disagg.store.objects.mooncake import MooncakeStore
from disagg.store.objects.resp import Address
from disagg.store.objects.s3 import S3Store
from disagg.store.objects.tier import Objects
from disagg.store.objects.valkey import ValkeyStore

needs_mooncake = pytest.mark.skipif(not has_mooncake(), reason="Mooncake is not installed")
KINDS = ("valkey", "s3", pytest.param("mooncake", marks=needs_mooncake))
_PREFIXES = itertools.count()


class Stores:
    """Stores of one kind on a server, all with one prefix, which no other test uses."""

    def __init__(self, kind: str, server: Server) -> None:
        self.kind, self.server = kind, server
        self.prefix = f"test/{next(_PREFIXES)}"
        self._opened: list[ObjectStore] = []

    def open(self, *, timeout_s: float = 30.0, ttl_s: float | None = None) -> ObjectStore:
        store: ObjectStore
        if self.kind == "valkey":
            at = Address("127.0.0.1", self.server.port)
            store = ValkeyStore(at, self.prefix, "valkey", ttl_s=ttl_s, timeout_s=timeout_s)
        elif self.kind == "mooncake":
            address = f"127.0.0.1:{self.server.port}"
            store = MooncakeStore(address, self.prefix, "mooncake", timeout_s=timeout_s)
        else:
            endpoint = f"http://127.0.0.1:{self.server.port}"
            secrets = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
            store = S3Store(
                BUCKET,
                self.prefix,
                "s3",
                endpoint=endpoint,
                region="us-east-1",
                credentials=secrets,
                timeout_s=timeout_s,
            )
        self._opened.append(store)
        return store

    def tier(self, rank: int = 0, store: ObjectStore | None = None, **more: Any) -> Objects:
        return Objects(store or self.open(), FINGERPRINT, rank, SPEC, **more)

    def close(self) -> None:
        for store in self._opened:
            store.close()


MakeStores = Callable[[], Stores]


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_valkey(tmp_path_factory.mktemp("valkey") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_s3(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def mooncake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_mooncake(tmp_path_factory.mktemp("mooncake") / "log") as server:
        yield server


@pytest.fixture(params=KINDS)
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    made = Stores(request.param, request.getfixturevalue(f"{request.param}_server"))
    yield made
    made.close()


@pytest.fixture
def valkey(valkey_server: Server) -> Iterator[Stores]:
    made = Stores("valkey", valkey_server)
    yield made
    made.close()


@pytest.fixture
def s3(s3_server: Server) -> Iterator[Stores]:
    made = Stores("s3", s3_server)
    yield made
    made.close()


def name_of(key: bytes, rank: int = 0) -> str:
    return f"{FINGERPRINT.namespace}/{file_name(key, rank)}"


def content(store: ObjectStore, name: str) -> bytes | None:
    return store.fetch(name, 1 << 19)


def replace(store: ObjectStore, name: str, data: bytes) -> None:
    store.put(name, [memoryview(data)])


@pytest.fixture
def exits() -> Iterator[contextlib.ExitStack]:
    """What tests enter is left at their end."""
    with contextlib.ExitStack() as stack:
        yield stack
