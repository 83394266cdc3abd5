"""Valkey and Redis as an object store: one server, or one name for it; no cluster.

Commands: GETRANGE, SET, STRLEN, UNLINK, TOUCH or PEXPIRE, INFO, and AUTH and SELECT if they are
configured. The server's `maxmemory` limits the size, its eviction policy chooses what goes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from disagg.store.objects.base import DENIED, TIMEOUT, Entry, StoreError
from disagg.store.objects.resp import Address, Argument, Connection, Reply, ReplyError

logger = logging.getLogger(__name__)

_IDLE = 16
_OTHER_TYPE = -1
T = TypeVar("T")


class ValkeyStore:
    """ttl_s: how long objects are kept after they were last used; None: until they are evicted."""

    batch = 512

    def __init__(
        self,
        address: Address,
        prefix: str,
        place: str,
        *,
        ttl_s: float | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self.place = place
        self._address, self._prefix, self._timeout_s = address, prefix, timeout_s
        self._ttl = None if ttl_s is None else str(max(1, round(ttl_s * 1000))).encode()
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def put(self, name: str, pieces: Sequence[memoryview], *, only_new: bool = False) -> bool:
        command: list[Argument] = [b"SET", self._key(name), pieces]
        if only_new:
            command.append(b"NX")
        elif self._ttl is not None:
            command += [b"PX", self._ttl]
        return _ok(self._call([command]))[0] is not None

    def get(self, name: str, buffers: Sequence[memoryview]) -> int | None:
        size = sum(buffer.nbytes for buffer in buffers)
        # One byte more than there should be: a longer object is found, and not read.
        command = [b"GETRANGE", self._key(name), b"0", str(size).encode()]

        def read(connection: Connection) -> int:
            found = connection.read_value(command, buffers, self._timeout_s)
            if found not in (0, size):
                connection.close()  # rather than read what is of no use
            return found

        try:
            return self._on_a_connection(read, lambda found: found in (0, size)) or None
        except ReplyError as error:
            if error.code == "WRONGTYPE":
                return _OTHER_TYPE
            raise

    def fetch(self, name: str, limit: int) -> bytes | None:
        (reply,) = _ok(self._call([[b"GETRANGE", self._key(name), b"0", str(limit).encode()]]))
        assert isinstance(reply, bytes)
        if len(reply) > limit:
            raise StoreError("size", f"an object of more than {limit} bytes")
        return reply or None

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        replies = self._call([[b"STRLEN", self._key(name)] for name in names])
        return [_size(reply) for reply in replies]

    def touch(self, names: Sequence[str]) -> None:
        if not names:
            return
        if self._ttl is None:
            _ok(self._call([[b"TOUCH", *map(self._key, names)]]))
        else:
            _ok(self._call([[b"PEXPIRE", self._key(name), self._ttl] for name in names]))

    def remove(self, names: Sequence[str]) -> None:
        if names:
            _ok(self._call([[b"UNLINK", *map(self._key, names)]]))

    def entries(self) -> Iterator[Entry]:
        raise StoreError("unsupported", "a Valkey server limits its size itself")

    def unlimited(self) -> str:
        """Why this server's memory may fill up; empty if it evicts what was not used."""
        (reply,) = _ok(self._call([[b"INFO", b"memory"]]))
        assert isinstance(reply, bytes)
        info = dict(
            line.split(":", 1) for line in reply.decode(errors="replace").split() if ":" in line
        )
        if info.get("maxmemory") == "0":
            return "maxmemory is not set"
        if info.get("maxmemory_policy") == "noeviction":
            return "maxmemory-policy is noeviction"
        if str(info.get("maxmemory_policy")).startswith("volatile") and self._ttl is None:
            return "maxmemory-policy evicts only keys with a ttl, and no ttl is set"
        return ""

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # ---- inside ----------------------------------------------------------------------------

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}/{name}".encode()

    def _call(self, commands: Sequence[Sequence[Argument]]) -> list[Reply]:
        return self._on_a_connection(lambda one: one.call(commands, self._timeout_s))

    def _on_a_connection(
        self, use: Callable[[Connection], T], keeps: Callable[[T], bool] = lambda _: True
    ) -> T:
        """Every call can be repeated, so one that fails on a connection that the server has closed
        meanwhile gets a new one. keeps: whether the connection can be used again."""
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            connection = idle or Connection(self._address)
            try:
                result = use(connection)
            except ReplyError as error:
                self._keep(connection, fine=error.reason != DENIED)
                raise
            except BaseException as error:
                connection.close()
                if idle is not None and isinstance(error, StoreError) and error.reason != TIMEOUT:
                    continue
                raise
            self._keep(connection, fine=keeps(result))
            return result

    def _keep(self, connection: Connection, *, fine: bool) -> None:
        with self._lock:
            if fine and len(self._idle) < _IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _ok(replies: list[Reply]) -> list[Reply]:
    """The replies, if none is a refusal; else raises the first refusal."""
    for reply in replies:
        if isinstance(reply, ReplyError):
            raise reply
    return replies


def _size(reply: Reply) -> int | None:
    if isinstance(reply, ReplyError):
        if reply.code == "WRONGTYPE":
            return _OTHER_TYPE
        raise reply
    if not isinstance(reply, int):
        raise StoreError("protocol", "STRLEN gave no number")
    return reply or None
