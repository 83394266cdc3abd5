"""The messages of the control channel, named for what they ask; one struct each.

Consumer -> producer: Hello, Acquire, Fetch, Release, Renew. Producer -> consumer: Welcome,
Acquired, Fetched, Done, Failed. Every request gets exactly one answer, in order. Encoded as
msgpack by msgspec; unknown types and wrong fields are refused by the decoder.
"""

from __future__ import annotations

import msgspec

VERSION = 5

# One frame; the largest is a Hello with its fingerprint. Block ids never travel: a fetch names
# positions in the lease, and the producer looks up its own ids.
MAX_FRAME = 1 << 20


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who the consumer is. `fingerprint` must equal the producer's, field by field.

    An empty one says that there is no cache on this side: such a peer may only release.
    """

    version: int
    engine: str
    fingerprint: dict[str, str]


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Take the lease into use. `generation` is the producer worker's life, not its port."""

    generation: str
    lease: int


class Part(msgspec.Struct, frozen=True):
    """Which part of a lease: units of `unit` tokens each, spans [start, stop) by position in the
    lease's blocks, and heads and regions [first, last) as the producer's rank counts them; None
    for all. Where spans meet, they begin and end with a block."""

    unit: int
    spans: tuple[tuple[int, int], ...]
    heads: tuple[int, int] | None = None
    regions: tuple[int, int] | None = None


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """A part of the acquired lease, over one transport."""

    transport: str
    part: Part
    detail: bytes


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End a lease, acquired or not: fetched, or no longer wanted.

    `readers` ranks of the consumer read this lease; it ends when all of them have fetched.
    """

    generation: str
    lease: int
    outcome: str
    readers: int = 1


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """The requests of these leases still wait in the consumer's queue."""

    generation: str
    leases: list[int]


Request = Hello | Acquire | Fetch | Release | Renew


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Hello fits. `offers`: transport name -> what its receiver must know. `layers`: what each
    region of the producer's cache holds, in order; the consumer compares those that it reads.
    `slot`: where this connection says which lease it reads, see hazards.py."""

    engine: str
    generation: str
    offers: dict[str, bytes]
    layers: tuple[str, ...]
    slot: int = -1


class Acquired(msgspec.Struct, frozen=True, tag="acquired"):
    """In use until Release or until this connection ends."""

    num_blocks: int


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The sender's answer for `Receiver.receive`."""

    answer: bytes


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Acknowledges Release and Renew."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request was understood and not done. `reason` is a metric label."""

    reason: str
    message: str


Answer = Welcome | Acquired | Fetched | Done | Failed

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def misfit(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first field of two fingerprints that differs, as a sentence; None when they agree."""
    for field in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(field, "not given"), theirs.get(field, "not given")
        if mine != other:
            return f"{field} differs: {mine!r} here, {other!r} there"
    return None
