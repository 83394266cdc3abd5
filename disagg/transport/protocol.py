"""The messages of the control channel; one struct each.

Consumer -> producer: Hello, Acquire, Await, Follow, Proceed, Fetch, Release, Renew. Producer ->
consumer: Welcome, Acquired, Awaited, Grown, Fetched, Done, Failed. Every request gets exactly one
answer, in order. Encoded as msgpack by msgspec; unknown types and wrong fields are refused by the
decoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

VERSION = 5
_LONG_VALUE, _SHOWN = 160, 80

# The body of a frame. The longest answer names the blocks of a fetch that the consumer reads by
# itself. No request names block ids: a fetch names positions in the lease, and the producer looks
# up its own ids.
MAX_FRAME = 1 << 20
MAX_REQUEST = 64 << 10

# Every reason of a `TransferError`: a metric label, so a producer cannot name another one.
REASONS = frozenset(
    {
        "corrupt", "deadline", "device", "forged", "lease_gone", "malformed", "nccl", "nccl_chunk",
        "nccl_closed", "nccl_full", "nccl_gone", "nccl_paused", "nccl_size", "nccl_stalled",
        "nixl", "nixl_closed", "nixl_paused", "nixl_stalled",
        "no_transport", "peer_lost", "process_memory", "process_memory_denied", "prompt_mismatch",
        "protocol", "range", "refused",
        "secret", "storage_checksum", "storage_full", "storage_header", "storage_name",
        "storage_read", "storage_size", "storage_write", "tcp_checksum", "tcp_full",
        "tcp_gone", "tcp_size", "too_large", "transfer", "window",
    }
)  # fmt: skip


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The consumer's first message. fingerprint: must equal the producer's, field by field.

    An empty fingerprint means that the consumer has no cache; it may then only release leases.
    """

    version: int
    engine: str
    fingerprint: dict[str, str]


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Take the lease into use. generation: identifies one life of the producer's worker."""

    generation: str
    lease: int


class Await(msgspec.Struct, frozen=True, tag="await"):
    """Say whether a stream's lease has begun, with its prompt's first step, as soon as it has, or
    after `seconds`. prompt: a digest of the prompt, which must be the lease's."""

    generation: str
    stream: bytes
    prompt: bytes
    seconds: float


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Take the lease of a stream that has begun into use. Answered by Grown."""

    generation: str
    stream: bytes
    prompt: bytes


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """Say how far the lease that is followed has grown, as soon as it is further than this, or
    after `seconds`. What was fetched of it before is right if the epoch is still the same."""

    epoch: int
    tokens: int
    seconds: float


class Part(msgspec.Struct, frozen=True):
    """A part of a lease. unit: tokens per unit. spans: [start, stop) in units, by position in the
    lease's blocks; inner span bounds are block bounds. heads, regions: [first, last) as the
    producer's rank counts them; None for all."""

    unit: int
    spans: tuple[tuple[int, int], ...]
    heads: tuple[int, int] | None = None
    regions: tuple[int, int] | None = None


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Send a part of the acquired lease over one transport."""

    transport: str
    part: Part
    detail: bytes


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End a lease, acquired or not. outcome: fetched or aborted.

    readers: how many of the consumer's ranks read this lease; it ends when all have fetched it.
    stream: instead of the lease's number, before its consumer knows that.
    """

    generation: str
    lease: int
    outcome: str
    readers: int = 1
    stream: bytes = b""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """The requests of these leases still wait in the consumer's queue. streams: those whose number
    it does not know."""

    generation: str
    leases: list[int]
    streams: list[bytes] = []


Request = Hello | Acquire | Await | Follow | Proceed | Fetch | Release | Renew


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The fingerprints are equal. offers: transport name -> `Sender.offer`. layers: what each of
    the producer's regions holds, in order; the consumer compares the regions that it reads. slot:
    the hazard slot of this connection, see `one_sided/hazard_pointers.py`."""

    engine: str
    generation: str
    offers: dict[str, bytes]
    layers: tuple[str, ...]
    slot: int = -1


class Acquired(msgspec.Struct, frozen=True, tag="acquired"):
    """The lease is in use until Release, or until this connection ends."""

    num_blocks: int


class Awaited(msgspec.Struct, frozen=True, tag="awaited"):
    """Answers Await. is_queued: the prompt's request waits for its first step."""

    has_begun: bool
    is_queued: bool = False


class Grown(msgspec.Struct, frozen=True, tag="grown"):
    """The lease is in use. tokens: of its prompt that are final, in epoch `epoch` (`Growth`).
    is_whole: all of it can be fetched."""

    lease: int
    epoch: int
    tokens: int
    is_whole: bool


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The sender's answer, for `RemoteCache.receive`."""

    answer: bytes


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Acknowledges Release and Renew."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request was not carried out. reason: one of `REASONS`."""

    reason: str
    message: str


Answer = Welcome | Acquired | Awaited | Grown | Fetched | Done | Failed

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def shortened(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """A fingerprint whose Hello fits into a first frame: of long values, such as overrides of the
    model's configuration, the beginning and a hash."""
    return {
        field: value
        if len(value) <= _LONG_VALUE
        else f"{value[:_SHOWN]}... sha256 {hashlib.sha256(value.encode()).hexdigest()}"
        for field, value in fingerprint.items()
    }


def misfit(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """The first field that differs between two fingerprints, as a sentence; None if equal."""
    for field in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(field, "not given"), theirs.get(field, "not given")
        if mine != other:
            return f"{field} differs: {mine!r} here, {other!r} there"
    return None
