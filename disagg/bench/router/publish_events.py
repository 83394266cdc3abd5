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
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(prompt),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def batch(events: Sequence[dict[str, Any]]) -> bytes:
    """One step's events as they travel."""
    return _encode([time.time(), list(events), 0])


def payloads(prompts: int) -> list[bytes]:
    """Batches in each of which a prompt is stored, and the one before removed, block by block as
    vLLM does. They can be repeated."""
    generator = random.Random(3)
    stored = [event_of(ids(generator, _EVENT), number) for number in range(prompts)]
    found = []
    for number, event in enumerate(stored):
        gone = stored[number - 1]["block_hashes"]
        removed = [
            {"type": "BlockRemoved", "block_hashes": [one], "medium": "GPU", "group_idx": 0}
            for one in reversed(gone)
        ]
        found.append(batch([*removed, event]))
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
