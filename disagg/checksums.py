"""Checksums of bytes that lie in files: keyed, or fast.

A keyed checksum (BLAKE3) proves that the bytes come from a holder of the deployment's secret: a
file that others may write is believed only with one. The fast one (xxh3-128) finds damage, but
whoever can write the file can make another with the same checksum in a fraction of a second.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal, Protocol

import xxhash
from typing_extensions import Buffer

from disagg.transport.control.secret import secret_for

ChecksumName = Literal["keyed", "fast"]

DIGEST_BYTES = 16
_KEY_BYTES = 32


class Running(Protocol):
    """A checksum in the making."""

    def update(self, data: Buffer, /) -> object:
        """Add these bytes."""

    def digest(self) -> bytes:
        """At least `DIGEST_BYTES` bytes."""


@dataclass(frozen=True)
class Checksum:
    """One kind of checksum; with a key, the keyed one."""

    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def named(cls, name: ChecksumName, purpose: bytes, secret: bytes) -> Checksum:
        """The checksum of this name. Its key serves one purpose only."""
        if name == "fast":
            return cls()
        return cls(secret_for(purpose, secret)[:_KEY_BYTES])

    @property
    def kind(self) -> str:
        """Which checksum this is, and with which key, without revealing the key."""
        if self.key is None:
            return "xxh3"
        return f"blake3-{hashlib.sha256(b'disagg checksum key' + self.key).hexdigest()[:16]}"

    def begin(self) -> Running:
        """A checksum over no bytes yet."""
        if self.key is None:
            return xxhash.xxh3_128()
        import blake3  # a machine for measuring GPUs may lack it

        return blake3.blake3(key=self.key)

    def of(self, *data: Buffer) -> bytes:
        """The checksum over these bytes, however they are split: `DIGEST_BYTES` bytes."""
        running = self.begin()
        for piece in data:
            running.update(piece)
        return running.digest()[:DIGEST_BYTES]
