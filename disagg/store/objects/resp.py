"""One connection to a server of the Valkey and Redis protocol (RESP2), with deadlines for calls.

It sends from and receives into the caller's memory, and reads only the kinds of replies that
`valkey` asks for. valkey-py copies a value several times, while the model waits for the GIL: to get
16 MB it takes 5 times as long, and 10 times the CPU.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from disagg.safe_logging import foreign
from disagg.store.objects.base import (
    DENIED,
    FULL,
    TIMEOUT,
    UNREACHABLE,
    Filling,
    StoreError,
    bad_certificate,
    other_host,
    unknown_authority,
)

Argument: TypeAlias = bytes | Sequence[memoryview]
"""One argument of a command; as pieces, its bytes in order."""
Reply: TypeAlias = "int | bytes | ReplyError | None"

_STEP = 1 << 20
_READ = 4096
_LONGEST_LINE = 1 << 16
_LARGEST_BULK = 1 << 20
_LARGEST_VALUE = 512 << 20  # of the protocol

# OpenSSL's X509_V_ERR_*: a host's name, an address; and a chain that ends at nobody's.
_NOT_ITS_NAME = frozenset({62, 64})
_NO_AUTHORITY = frozenset({2, 18, 19, 20, 21})
_NO_TLS = "if the server has no TLS, write valkey:// in tiers.objects.url"

_REASONS = {
    "OOM": FULL,
    "NOAUTH": DENIED,
    "WRONGPASS": DENIED,
    "NOPERM": DENIED,
    "READONLY": "read_only",
    "MOVED": "cluster",
    "LOADING": "busy",
    "BUSY": "busy",
    "MASTERDOWN": "busy",
    "CLUSTERDOWN": "busy",
    "TRYAGAIN": "busy",
}


class ReplyError(StoreError):
    """The server refused a command. code: the first word of its answer."""

    def __init__(self, text: str) -> None:
        self.code = text.split(" ", 1)[0]
        super().__init__(_REASONS.get(self.code, "refused"), f"the server said: {foreign(text)}")


@dataclass(frozen=True)
class Address:
    """A server, and how to be let in. tls: None for a plain connection."""

    host: str
    port: int
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    connect_timeout_s: float = 2.0


class Connection:
    """For one thread at a time. After any `StoreError` but a `ReplyError` it must be closed."""

    def __init__(self, address: Address) -> None:
        self._deadline = time.monotonic() + address.connect_timeout_s
        self._read = bytearray()
        with _as_store_errors():
            self._socket = socket.create_connection(
                (address.host, address.port), timeout=address.connect_timeout_s
            )
            try:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if address.tls is not None:
                    self._socket.settimeout(self._left())
                    self._socket = _encrypted(self._socket, address.tls, address.host)
                self._enter(address)
            except BaseException:
                self.close()
                raise

    def _enter(self, address: Address) -> None:
        commands: list[list[Argument]] = []
        if address.password:
            user = [address.user.encode()] if address.user else []
            commands.append([b"AUTH", *user, address.password.encode()])
        if address.database:
            commands.append([b"SELECT", str(address.database).encode()])
        for reply in self._exchange(commands):
            if isinstance(reply, ReplyError):
                if reply.reason == "refused":  # however a server says it
                    raise StoreError(DENIED, str(reply))
                raise reply

    def call(self, commands: Sequence[Sequence[Argument]], timeout_s: float) -> list[Reply]:
        """Send all commands, and read a reply of each; refusals are among them."""
        self._deadline = time.monotonic() + timeout_s
        with _as_store_errors():
            return self._exchange(commands)

    def read_value(
        self, command: Sequence[Argument], buffers: Sequence[memoryview], timeout_s: float
    ) -> int:
        """The size of a command's value, which fills the buffers if it is theirs. Else the
        connection must be closed, unless the size is 0. Raises `ReplyError`."""
        self._deadline = time.monotonic() + timeout_s
        with _as_store_errors():
            self._send(command)
            kind, size = self._number()
            if kind != "$" or size > _LARGEST_VALUE:
                raise _protocol()
            if size <= 0:
                if size == 0:
                    self._line()
                return 0
            if size != sum(buffer.nbytes for buffer in buffers):
                return size
            self._receive(Filling(buffers))
            self._end()
            return size

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    # ---- sending ---------------------------------------------------------------------------

    def _exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Reply]:
        for command in commands:
            self._send(command, more=True)
        self._flush()
        return [self._reply() for _ in commands]

    _waiting = b""

    def _send(self, command: Sequence[Argument], *, more: bool = False) -> None:
        """more: short commands may wait for the next one, or for `_flush`."""
        text = bytearray(self._waiting)
        text += b"*%d\r\n" % len(command)
        for argument in command:
            if isinstance(argument, bytes):
                text += b"$%d\r\n%b\r\n" % (len(argument), argument)
                continue
            text += b"$%d\r\n" % sum(piece.nbytes for piece in argument)
            self._send_all(memoryview(text))
            for piece in argument:
                self._send_all(piece.cast("B"))
            text = bytearray(b"\r\n")
        self._waiting = bytes(text)
        if not more or len(text) > _LONGEST_LINE:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, b""
        self._send_all(memoryview(waiting))

    def _send_all(self, data: memoryview) -> None:
        while data.nbytes:
            self._socket.settimeout(self._left())
            data = data[self._socket.send(data[:_STEP]) :]

    # ---- receiving -------------------------------------------------------------------------

    def _reply(self) -> Reply:
        try:
            kind, size = self._number()
        except ReplyError as error:
            return error
        if kind != "$":
            return size
        if size < 0:
            return None
        if size > _LARGEST_BULK:
            raise _protocol()
        value = bytearray(size)
        self._receive(Filling([memoryview(value)]))
        self._end()
        return bytes(value)

    def _number(self) -> tuple[str, int]:
        """The kind of a reply and its number; 1 for a status. Raises `ReplyError`."""
        line = self._line()
        kind, rest = chr(line[0]) if line else "", line[1:]
        if kind == "+":
            return kind, 1
        if kind == "-":
            raise ReplyError(rest.decode(errors="replace"))
        if kind not in ("$", ":") or not rest.removeprefix(b"-").isdigit() or len(rest) > 20:
            raise _protocol()
        return kind, int(rest)

    def _line(self) -> bytes:
        while (end := self._read.find(b"\r\n")) < 0:
            if len(self._read) > _LONGEST_LINE:
                raise _protocol()
            self._socket.settimeout(self._left())
            received = self._socket.recv(_READ)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            self._read += received
        line = bytes(self._read[:end])
        del self._read[: end + 2]
        return line

    def _receive(self, filling: Filling) -> None:
        while self._read and not filling.is_full:
            room = filling.next(len(self._read))
            room[:] = self._read[: len(room)]
            del self._read[: len(room)]
            filling.filled(len(room))
        while not filling.is_full:
            self._socket.settimeout(self._left())
            count = self._socket.recv_into(filling.next(_STEP))
            if not count:
                raise ConnectionResetError("the server closed the connection")
            filling.filled(count)

    def _end(self) -> None:
        if self._line():
            raise _protocol()

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


def _encrypted(plain: socket.socket, tls: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    try:
        return tls.wrap_socket(plain, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _NOT_ITS_NAME:
            raise other_host(host, "url") from error
        if error.verify_code in _NO_AUTHORITY:
            raise unknown_authority() from error
        raise bad_certificate(error.verify_message) from error
    except TimeoutError as error:  # a server without TLS waits for the end of a line
        raise StoreError(TIMEOUT, f"no answer to a TLS handshake; {_NO_TLS}") from error
    except ssl.SSLError as error:
        raise StoreError("tls", f"no TLS with the server ({error.reason}); {_NO_TLS}") from error


def _protocol() -> StoreError:
    return StoreError("protocol", "the server does not speak the protocol of Valkey")


@contextlib.contextmanager
def _as_store_errors() -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except TimeoutError as error:
        raise StoreError(TIMEOUT, str(error)) from error
    except OSError as error:
        raise StoreError(UNREACHABLE, error.strerror or str(error)) from error
