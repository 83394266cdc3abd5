"""A Mooncake store: memory of many machines, which its master gives out.

Engines are clients that lend it no memory, so what they keep outlives them: `mooncake_client`
processes lend it. The memory's size is the limit, and the master evicts what was not used.

Mooncake's client has no deadlines that can be set: a call may take 30 seconds. So each runs in a
thread that nobody waits for longer than `timeout_s`, and reads into memory of the client's own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from disagg.errors import ConfigError
from disagg.object_urls import MOONCAKE_INSTALL
from disagg.store.objects.base import FULL, TIMEOUT, UNREACHABLE, Entry, Filling, StoreError

AT_ONCE = 16
"""Calls at the same time. Those that nobody waits for any more count, too."""
_LOCAL_SIZE, _LOCAL_BYTES = "MOONCAKE_LOCAL_BUFFER_SIZE", 256 << 20
_LOOK_S = 0.005
# Of Mooncake's error codes.
_NO_SPACE, _TOO_LONG, _BEING_WRITTEN, _MISSING = {-10, -200, -201}, -600, -703, -704
_REASONS = dict.fromkeys(_NO_SPACE, FULL) | {_TOO_LONG: "size"}
_LEFT: list[Any] = []
"""Clients that are in use when they should be closed."""
T = TypeVar("T")


class MooncakeStore:
    """address: the master's, host:port. What else a client needs is in the environment, by
    Mooncake's own names. Raises `ConfigError` if it is wrong, or Mooncake cannot be imported."""

    batch = 512

    def __init__(self, address: str, prefix: str, place: str, *, timeout_s: float = 5.0) -> None:
        self.place = place
        self._address, self._prefix, self._timeout_s = address, prefix, timeout_s
        self._make, self._local_bytes = _client_class(), _local_bytes()
        self._client: Any = None
        self._lock = threading.Lock()
        self._free = threading.Semaphore(AT_ONCE)

    def put(self, name: str, pieces: Sequence[memoryview], *, only_new: bool = False) -> bool:
        # If nobody waits any more, the pieces may change while they are sent. Readers find out:
        # they compare checksums.
        key, parts = self._key(name), [piece.cast("B") for piece in pieces if piece.nbytes]

        def put(client: Any) -> bool:
            if _check(client.is_exist(key)):
                if only_new or _holds(client, key, parts):
                    return not only_new
                # Not by `upsert_parts`: its readers may see half of it.
                _check_removed(client.remove(key, True))
            # It leaves what another client puts at the same time, and does not say so.
            _check(client.put_parts(key, *parts))
            deadline = time.monotonic() + self._timeout_s
            while not _check(client.is_exist(key)):
                if time.monotonic() > deadline:
                    raise StoreError(TIMEOUT, "another client does not end its write")
                time.sleep(_LOOK_S)
            return not only_new or _holds(client, key, parts)

        return self._call(put)

    def get(self, name: str, buffers: Sequence[memoryview]) -> int | None:
        found = self._read(name)
        if found is None:
            return None
        if found.nbytes == sum(buffer.nbytes for buffer in buffers):
            Filling(buffers).add(found)
        return found.nbytes

    def fetch(self, name: str, limit: int) -> bytes | None:
        found = self._read(name)
        if found is not None and found.nbytes > limit:
            raise StoreError("size", f"an object of more than {limit} bytes")
        return None if found is None else bytes(found)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        keys = [self._key(name) for name in names]
        found = self._call(lambda client: client.batch_get_replica_desc(keys)) if keys else {}
        if not found:
            self._check_answers(keys[:1])
        return [_size(found.get(key, ())) for key in keys]

    def touch(self, names: Sequence[str]) -> None:
        self._check_answers([self._key(name) for name in names])

    def remove(self, names: Sequence[str]) -> None:
        keys = [self._key(name) for name in names]
        if not keys:
            return
        # Also what is being read: its readers compare checksums.
        for code in self._call(lambda client: client.batch_remove(keys, True)):
            _check_removed(code)

    def entries(self) -> Iterator[Entry]:
        raise StoreError("unsupported", "a Mooncake master limits its size itself")

    def unlimited(self) -> str:
        """Nothing is: the memory that was lent is the limit."""
        return ""

    def close(self) -> None:
        """Wait for calls to end, for `timeout_s` at most. A client that is closed under a call ends
        the process by a segmentation fault, so one whose calls do not end stays."""
        deadline = time.monotonic() + self._timeout_s
        for _ in range(AT_ONCE):  # nobody can begin a call after this
            if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
                _LEFT.append(self._client)
                return
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # ---- inside ----------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _read(self, name: str) -> memoryview | None:
        key = self._key(name)

        def read(client: Any) -> memoryview | None:
            for _ in range(2):  # it may have come after the first
                handle = client.get_buffer(key)
                if handle is not None:
                    return memoryview(handle).cast("B")
                if not _check(client.is_exist(key)):
                    return None
            raise StoreError(UNREACHABLE, "who has the object's memory does not answer")

        return self._call(read)

    def _check_answers(self, keys: Sequence[str]) -> None:
        """Ask whether they exist, which is a use of those that do."""
        if keys:
            for code in self._call(lambda client: client.batch_is_exist(list(keys))):
                _check(code)

    def _call(self, call: Callable[[Any], T]) -> T:
        if not self._free.acquire(timeout=self._timeout_s):
            raise StoreError(TIMEOUT, f"{AT_ONCE} calls do not end")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call(self._connected()))
            except StoreError as error:
                future.set_exception(error)  # who waits raises it
            except Exception as error:  # noqa: BLE001
                future.set_exception(StoreError(UNREACHABLE, f"Mooncake's client: {error}"))
            finally:
                self._free.release()

        threading.Thread(target=run, name="kv-mooncake", daemon=True).start()
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            raise StoreError(TIMEOUT, f"no answer within {self._timeout_s:g} s") from None

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                client, given = self._make(), os.environ.get
                code = client.setup(
                    given("MOONCAKE_LOCAL_HOSTNAME") or _address_towards(self._address),
                    given("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
                    0,
                    self._local_bytes,
                    given("MOONCAKE_PROTOCOL", "tcp"),
                    given("MOONCAKE_DEVICE", ""),
                    self._address,
                )
                if code:
                    raise StoreError(UNREACHABLE, f"no connection to the master (code {code})")
                self._client = client
            return self._client


def _client_class() -> Any:
    # It would log each write that finds no room, and more; ours is one line for an outage.
    os.environ.setdefault("GLOG_minloglevel", "3")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"tiers.objects.url: mooncake — its client cannot be loaded ({error}); "
            f"{MOONCAKE_INSTALL}"
        ) from error
    return MooncakeDistributedStore


def _local_bytes() -> int:
    given = os.environ.get(_LOCAL_SIZE, "")
    if given and not (given.isascii() and given.isdigit()):
        raise ConfigError(f"{_LOCAL_SIZE}: {given!r} — is no number of bytes; write 268435456")
    return int(given or _LOCAL_BYTES)


def _address_towards(master: str) -> str:
    """This host's address in the master's network."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, int(port)))  # nothing is sent
            return str(sock.getsockname()[0])
    except OSError as error:
        raise StoreError(UNREACHABLE, f"the master's host cannot be reached ({error})") from error


def _check(code: int) -> int:
    """The code, if it is no error. Raises `StoreError`."""
    if code < 0:
        raise StoreError(_REASONS.get(code, UNREACHABLE), f"Mooncake's code {code}")
    return code


def _holds(client: Any, key: str, parts: Sequence[memoryview]) -> bool:
    return bool(client.get(key) == b"".join(parts))


def _check_removed(code: int) -> None:
    if code not in (_MISSING, _BEING_WRITTEN):
        _check(code)


def _size(replicas: Sequence[Any]) -> int | None:
    """Of an object in memory."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return None
