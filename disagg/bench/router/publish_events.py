"""KV events as vLLM publishes them, made up: for `known_blocks.py`, and as a process of its own.

`python -m disagg.bench.router.publish_events PORT BLOCKS_PER_SECOND SECONDS`
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

BLOCK = 16  # tokens
_EVENT = 512  # blocks of one stored event: a step's prompt tokens
_VOCABULARY = 150_000
_MASK = (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode


def ids(generator: random.Random, blocks: int) -> list[int]:
    """Random tokens of so many blocks."""
    return generator.choices(range(_VOCABULARY), k=blocks * BLOCK)


def event_of(prompt: Sequence[int], seed: int) -> dict[str, Any]:
    """The event that the whole prompt was stored."""
    hashes, parent = list[int](), seed
    for at in range(0, len(prompt), BLOCK):
        parent = hash((parent, *prompt[at : at + BLOCK])) & _MASK
        hashes.append(parent)
    return stored(hashes, None, list(prompt), BLOCK)


def stored(
    hashes: Sequence[int], parent: int | None, tokens: Sequence[int], block: int
) -> dict[str, Any]:
    """The event that these blocks of so many tokens were stored, behind that of hash `parent`."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(hashes: Sequence[int]) -> dict[str, Any]:
    """The event that these blocks were removed."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def batch(events: Sequence[dict[str, Any]]) -> bytes:
    """One step's events as they travel."""
    return _encode([time.time(), list(events), 0])


def payloads(prompts: int) -> list[bytes]:
    """Batches in each of which a prompt is stored, and the one before removed, block by block as
    vLLM does. They can be repeated."""
    generator = random.Random(3)
    events = [event_of(ids(generator, _EVENT), number) for number in range(prompts)]
    found = []
    for number, event in enumerate(events):
        gone = events[number - 1]["block_hashes"]
        found.append(batch([*(removed([one]) for one in reversed(gone)), event]))
    return found


def publish(port: int, rate: int, seconds: float) -> None:
    """Publish so many blocks a second, stored and removed together."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind(f"tcp://127.0.0.1:{port}")
    every, began, number = 2 * _EVENT / rate, time.perf_counter(), 0
    batches = payloads(16)
    while time.perf_counter() - began < seconds:
        socket.send_multipart([b"", number.to_bytes(8, "big"), batches[number % len(batches)]])
        number += 1
        time.sleep(max(0.0, began + number * every - time.perf_counter()))
    context.destroy(linger=0)


if __name__ == "__main__":
    publish(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
