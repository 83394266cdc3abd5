"""In bfloat16 the same bytes lie on both sides, and answers flip no more often than plain vLLM's.

Plain vLLM does not agree with itself there: a prompt computed cold and one from the prefix cache
take kernels of other shapes, whose last bits may decide a near tie. So blocks are compared byte
by byte, by a third consumer: this process. Answers are only counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.checksums import Checksum
from disagg.connector.handoff.kv_transfer_params import TICKET
from disagg.identity.weights import checkpoint
from disagg.private_files import PrivateFolder
from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.transport import fetch
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Region
from disagg.transport.control import ticket
from disagg.transport.control.client import Peers
from disagg.transport.deadline import Deadline
from disagg.transport.protocol import Part
from disagg.transport.shared_storage import SharedStorageReceiver, Storage
from disagg.vllm_compat import versions
from engine.conftest import running, transfer

LAYERS, HEADS, BLOCK, CONTENT = 4, 2, 128, 2 * 64 * 2  # K and V, head dim, bytes of a bfloat16
SECRET = "of these tests, thirty-two bytes"
Prompt = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def pair(
    model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[VllmServer]]:
    """The first is started as users start it."""
    logs = tmp_path_factory.mktemp("logs")
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp")), "DISAGG_SECRET": SECRET}
    servers = [
        start(name, model, logs / name, transfer("kv_both"), dtype="bfloat16", env=env)
        for name, start in (("first", VllmServer), ("second", vllm_server))
    ]
    with running(servers):
        yield servers


def fetched(server: VllmServer, params: dict[str, Any], model: Path) -> list[torch.Tensor]:
    """The blocks behind these params, as a consumer of its own reads them."""
    grant = ticket.verify(params[TICKET], SECRET.encode())
    blocks = -(-grant.num_tokens // BLOCK)
    cache = BlockCache(
        [
            Region(
                f"model.layers.{i}.self_attn.attn", torch.zeros(shape, dtype=torch.uint8), "BF16"
            )
            for i, shape in enumerate([(blocks, HEADS, BLOCK, CONTENT)] * LAYERS)
        ]
    )
    fingerprint = {
        "vllm": versions.blocks_of(),
        "checkpoint": checkpoint(str(model), None),
        "hash_seed": "vllm's own",
        "quantization": "None",
        "dtype": "torch.bfloat16",
        "kv_cache_dtype": "bfloat16",
        "block_size": str(BLOCK),
        "prefix_caching_hash_algo": "sha256",
        "kv_cache_layout": "LBHNC",
        "kv_heads": str(HEADS),
        "kv_cache_groups": "FullAttention",
        "packed_on": "",
    }
    nothing = ("hf_overrides", "hf_config_path", "mm_processor_kwargs", "long_context", "draft")
    fingerprint |= dict.fromkeys(nothing, "")
    folder = Path(server.env["TMPDIR"], f"disagg-{os.getuid()}", "handoffs")
    checksum = Checksum.named("keyed", b"disagg handoff files", SECRET.encode())
    storage = Storage(PrivateFolder(folder), 1 << 30, checksum=checksum)
    receiver = SharedStorageReceiver(cache, storage)
    peers = Peers("test", fingerprint, SECRET.encode())
    try:
        job = FetchJob(cache.whole(range(blocks)), Deadline.after(30))
        part = Part(BLOCK, ((0, blocks),))
        layers = [f"{region.name}@0 BF16[{CONTENT}]" for region in cache.regions]
        wanted = fetch.FetchRequest(grant.endpoints[0], grant.lease, part, layers)
        fetch.fetch(peers, wanted, job, [receiver])
    finally:
        peers.close()
    return [region.memory for region in cache.regions]


@pytest.mark.slow
def test_same_bytes_and_no_more_flips(pair: list[VllmServer], model: Path, prompt: Prompt) -> None:
    first, second = pair
    own = handed = 0
    for length in (150, 256, 300, 385):
        ids = prompt(length)
        cold = token_ids(first.complete(ids, max_tokens=8))
        cached = token_ids(first.complete(ids, max_tokens=8))
        params = first.prefill(ids)
        answer = token_ids(second.complete(ids, kv_transfer_params=params, max_tokens=8))
        own, handed = own + (cold != cached), handed + (cold != answer)
        ours = fetched(first, first.prefill(ids), model)
        theirs = fetched(second, second.prefill(ids), model)
        full = length // BLOCK
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a[:full].any(), "nothing was fetched"
            assert torch.equal(a[:full], b[:full]), f"{length} tokens, layer {layer}"
    loaded = second.metric("disagg_handoffs_total", transport="process_memory", outcome="loaded")
    assert loaded == 4
    assert handed <= own + 1
