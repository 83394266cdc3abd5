"""vLLM's KV events as they travel: `vllm/distributed/kv_events.py`, read without vLLM.

A peer may send anything. What does not decode raises msgspec.MsgspecError; what decodes is still
to be checked by who uses it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

MOST_BLOCKS, _MOST_TOKENS, _MOST_EVENTS = 1 << 16, 1 << 20, 1 << 17
"""Of one event; of one batch. A batch with more of them is not decoded."""

Handle: TypeAlias = int | bytes
"""An engine's hash of a block: its last 64 bits, or all of it."""
_Handles: TypeAlias = Annotated[list[Handle], msgspec.Meta(max_length=MOST_BLOCKS)]
_Extras: TypeAlias = Annotated[list[Any], msgspec.Meta(max_length=64)]
"""Names, salts, and identities of media with their offsets."""
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks came into a medium of the engine.

    `extra_keys`: one entry for each block. No `token_ids`: the blocks are those of earlier events,
    and now in this medium too, as tiers tell it.
    """

    block_hashes: _Handles
    parent_block_hash: Handle | None = None
    token_ids: Annotated[list[int], msgspec.Meta(max_length=_MOST_TOKENS)] = []
    block_size: int = 0
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: Annotated[list[_Extras | None], msgspec.Meta(max_length=MOST_BLOCKS)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks went out of a medium of the engine."""

    block_hashes: _Handles
    medium: _Name | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The engine's cache is empty."""


Event: TypeAlias = Stored | Removed | Cleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST_EVENTS)]


_BATCH = msgspec.msgpack.Decoder(_Batch)
event = msgspec.msgpack.Decoder(Event).decode
"""Decodes one event. Raises msgspec.MsgspecError."""


def events(payload: bytes) -> list[msgspec.Raw]:
    """The events of one batch, not decoded yet: a batch may be large. Raises MsgspecError."""
    return _BATCH.decode(payload).events


def handle(value: Handle) -> int:
    """The hash as a number of 64 bits, in which vLLM's tiers and caches agree."""
    return value if isinstance(value, int) else int.from_bytes(value[-8:], "big")
