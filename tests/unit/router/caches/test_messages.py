"""KV events as they travel: vLLM's own encoding, and sizes that are refused at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.router.caches import messages
from disagg.router.caches.messages import Cleared, Removed, Stored

_encode = msgspec.msgpack.encode


def decoded(payload: bytes) -> list[messages.Event]:
    return [messages.event(raw) for raw in messages.events(payload)]


def test_what_vllm_encodes() -> None:
    theirs: Any = pytest.importorskip("vllm.distributed.kv_events")
    extra = [("lora", ("image", 2), "salt"), None]
    batch = theirs.KVEventBatch(
        ts=1.5,
        events=[
            theirs.BlockStored([1, 2], 3, [4, 5], 1, None, "GPU", "lora", extra, 0, "full"),
            theirs.BlockStored([b"12345678"], None, [4], 1, None, None, None),
            theirs.BlockRemoved([1], "CPU", 0),
            theirs.AllBlocksCleared(),
        ],
        data_parallel_rank=1,
    )
    assert decoded(_encode(batch)) == [
        Stored(
            [1, 2], 3, [4, 5], 1, "GPU", "lora", [["lora", ["image", 2], "salt"], None], 0, "full"
        ),
        Stored([b"12345678"], None, [4], 1),
        Removed([1], "CPU", 0),
        Cleared(),
    ]


def test_whole_hashes_end_with_the_short_ones() -> None:
    assert messages.handle(bytes(24) + b"\1" * 8) == messages.handle(0x0101010101010101)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored", "block_hashes": [1] * (messages.MOST_BLOCKS + 1)},
        {"type": "BlockRemoved", "block_hashes": [1] * (messages.MOST_BLOCKS + 1)},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1] * ((1 << 20) + 1)},
        {"type": "BlockStored", "block_hashes": [1], "lora_name": "x" * 257},
        {"type": "BlockStored", "block_hashes": [1], "extra_keys": [["x"] * 65]},
        {"type": "BlockStored", "block_hashes": ["x"]},
        {"type": "BlockStored"},
        {"type": "Other"},
        [],
    ],
)
def test_what_is_refused(event: Any) -> None:
    (raw,) = messages.events(_encode([1.0, [event]]))
    with pytest.raises(msgspec.MsgspecError):
        messages.event(raw)


def test_a_batch_of_too_many_events_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        messages.events(_encode([1.0, [0] * ((1 << 17) + 1)]))
