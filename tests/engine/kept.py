"""What an engine of several ranks keeps in its tiers, and finds again."""

from __future__ import annotations

from disagg.bench.vllm_server import VllmServer, token_ids
from engine.waiting import eventually

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
        server.post(f"/reset_prefix_cache?reset_external={host}", {}).raise_for_status()
        bytes_loaded = "vllm:kv_offload_total_bytes_total"
        loaded = server.metric(bytes_loaded, transfer_type=source)
        assert token_ids(server.complete(ids)) == reference
        moved = server.metric(bytes_loaded, transfer_type=source) - loaded
        assert moved // block_bytes == blocks
