"""What holds of engines of several ranks, tensor or pipeline parallel."""

from __future__ import annotations

from collections.abc import Callable

from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import begun, routed
from engine.resets import reset_caches
from engine.streams import Streamed, stream

N = 128


def check_tiers(server: VllmServer, single: VllmServer, ids: list[int], block_bytes: int) -> None:
    """A prompt is found in host memory, and then in files, by all ranks together.

    block_bytes: of one block, over all ranks.
    """
    reference, blocks = token_ids(single.complete(ids)), len(ids) // N
    stored = "disagg_tier_stored_total"
    before = server.metric(stored, tier="directory")
    assert token_ids(server.complete(ids)) == reference
    assert eventually(lambda: server.metric(stored, tier="directory") >= before + blocks)
    for source, host in (("CPU_to_GPU", False), ("STORAGE_to_CPU", True)):
        assert eventually(lambda: not server.metric("disagg_tier_in_use_chunks", tier="host"))
        reset_caches(server, host=host)
        bytes_loaded = "vllm:kv_offload_total_bytes_total"
        loaded = server.metric(bytes_loaded, transfer_type=source)
        assert token_ids(server.complete(ids)) == reference
        moved = server.metric(bytes_loaded, transfer_type=source) - loaded
        assert moved // block_bytes == blocks


def check_streams(
    source: VllmServer,
    target: VllmServer,
    single: VllmServer,
    prompt: Callable[[int], list[int]],
    moved: Callable[[], float],
) -> None:
    """The rest is asked with a lease that is one token short of the prompt, whatever the ranks."""
    pairing = {"first_token": "prefill", "local_prefill_tokens": 0}
    with routed([source], [target], pairing=pairing) as url:
        assert eventually(lambda: client().get(f"{url}/ready", timeout=10).status_code == 200)
        before = moved()
        for length in (5, 128, 1000):
            body = {"model": "tiny", "prompt": prompt(length), "temperature": 0}
            body |= {"max_tokens": 16, "ignore_eos": True}
            seen = Streamed()
            stream(url, "/v1/completions", body, seen)
            seen.check(single.post("/v1/completions", body).json())
        assert begun(url) > 0
        assert moved() > before
