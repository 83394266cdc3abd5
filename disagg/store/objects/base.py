"""The contract of an object store, and its errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from disagg.safe_logging import foreign

UNREACHABLE, TIMEOUT, DENIED, FULL = "unreachable", "timeout", "denied", "full"
CERTIFICATE = "certificate"


class StoreError(OSError):
    """A store did not do what it was asked. The message names no secret. reason: a metric label."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


def unknown_authority() -> StoreError:
    """Of a server whose certificate nobody signed that is trusted here."""
    return StoreError(
        CERTIFICATE,
        "the server's certificate is signed by no authority that is trusted here; name a PEM file "
        "of that authority in tiers.objects.ca_file",
    )


def other_host(host: str, key: str) -> StoreError:
    """Of a server whose certificate has other names. key: the setting that names the host."""
    return StoreError(
        CERTIFICATE,
        f"the server's certificate is not for {host}; write a host that it names in "
        f"tiers.objects.{key}, or give the server a certificate for {host}",
    )


def bad_certificate(why: str) -> StoreError:
    """Of a certificate that is wrong otherwise."""
    return StoreError(CERTIFICATE, f"the server's certificate is refused: {foreign(why)}")


class Entry(NamedTuple):
    """An object as a listing shows it. changed_at: seconds since 1970, by the store's clock."""

    name: str
    num_bytes: int
    changed_at: float


class ObjectStore(Protocol):
    """Bytes by name. Any number of threads may call it. Every call ends within the store's
    timeouts, and may be repeated. All raise `StoreError`.

    Names are relative to the URL's prefix.
    """

    place: str
    """Where it is, for logs."""
    batch: int
    """How many names `sizes` looks up in about the time of one."""

    def put(self, name: str, pieces: Sequence[memoryview], *, only_new: bool = False) -> bool:
        """Write an object of these bytes, whole or not at all. only_new: leave one that exists.
        Returns whether it was written."""

    def get(self, name: str, buffers: Sequence[memoryview]) -> int | None:
        """Fill the buffers in order. Returns the object's size; None if there is none. If that is
        not the buffers' size, they hold nothing useful."""

    def fetch(self, name: str, limit: int) -> bytes | None:
        """A small object; None if there is none. Fails for more than `limit` bytes."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Each object's size; None if there is none."""

    def touch(self, names: Sequence[str]) -> None:
        """Renew their time of use and their time to live, where the store has these."""

    def remove(self, names: Sequence[str]) -> None:
        """Missing ones are skipped."""

    def entries(self) -> Iterator[Entry]:
        """All objects. May not be supported (`StoreError`)."""

    def unlimited(self) -> str:
        """Why nobody limits its size; empty if that is not known. `space` limits S3."""

    def close(self) -> None:
        """Let go of connections."""


class Filling:
    """Copies pieces of any size into buffers, in order."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._left = [buffer.cast("B") for buffer in reversed(buffers) if buffer.nbytes]

    def add(self, piece: memoryview) -> None:
        """Raises `StoreError` for more bytes than there is room for."""
        while piece.nbytes:
            room = self.next(piece.nbytes)
            room[:] = piece[: len(room)]
            piece = piece[len(room) :]
            self.filled(len(room))

    def next(self, most: int) -> memoryview:
        """Where to write next, at most so many bytes; `filled` must follow."""
        if not self._left:
            raise StoreError("size", "more bytes came than were announced")
        return self._left[-1][:most]

    def filled(self, count: int) -> None:
        """So many bytes were written to `next`."""
        rest = self._left.pop()[count:]
        if rest:
            self._left.append(rest)

    @property
    def is_full(self) -> bool:
        return not self._left
