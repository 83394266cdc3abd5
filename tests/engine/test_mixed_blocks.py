"""A model whose KV cache groups have blocks of other sizes, handed over and kept in tiers: Gemma 4.

The first engine computes each prompt, which is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from disagg.testing.vllm_server import VllmServer, token_ids
from engine.conftest import beside, lengths, running, tiers, transfer
from engine.engines_with_tiers import forget
from engine.followed import check_followed
from engine.windows import BLOCK, GROUP_BYTES, WINDOW, make_mixed

Prompt = Callable[[int], list[int]]
LARGE = 2 * BLOCK
"""Tokens of a block of the sliding layers."""


@pytest.fixture(scope="module")
def pair(
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Three groups: two of sliding layers, one of full ones. The second engine has tiers too."""
    model = tmp_path_factory.mktemp("model") / "mixed"
    make_mixed(model)
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp")), "VLLM_SERVER_DEV_MODE": "1"}
    logs = tmp_path_factory.mktemp("logs")
    args: tuple[str, ...] = ("--max-model-len", "4096", "--num-gpu-blocks-override", "512")
    args += ("--max-num-batched-tokens", "384", "--max-num-seqs", "16")
    both = beside(transfer("kv_both"), tiers(host_bytes=1 << 28, reset_keeps_files=True))
    servers = [
        vllm_server(name, model, logs / name, config, args, env=env)
        for name, config in (("first", transfer("kv_both")), ("second", both))
    ]
    with running(servers):
        yield servers[0], servers[1]


@lengths(5, 257, 1000, long=[128, 384, 3000])
def test_blocks_of_both_sizes_move(
    pair: tuple[VllmServer, VllmServer], prompt: Prompt, length: int
) -> None:
    first, second = pair
    ids = prompt(length)
    before = second.metric("disagg_handoff_bytes_total", transport="process_memory")
    answer = second.complete(ids, kv_transfer_params=first.prefill(ids))
    assert token_ids(answer) == token_ids(first.complete(ids))
    known = length - 1  # the last token is computed by decode
    full = -(-known // BLOCK)
    sliding = -(-known // LARGE) - max(0, known - WINDOW + 1) // LARGE
    moved = second.metric("disagg_handoff_bytes_total", transport="process_memory") - before
    assert moved == (full + 2 * sliding) * 2 * GROUP_BYTES


@lengths(2, 384, long=[257, 1400, 3000])
def test_followed(pair: tuple[VllmServer, VllmServer], prompt: Prompt, length: int) -> None:
    first, second = pair
    check_followed(first, second, lambda: prompt(length), lambda i: token_ids(first.complete(i)))


def test_the_next_turn(pair: tuple[VllmServer, VllmServer], prompt: Prompt) -> None:
    first, second = pair
    ids = prompt(900)
    second.complete(ids, kv_transfer_params=first.prefill(ids))
    longer = [*ids, *prompt(400)]
    answer = second.complete(longer, kv_transfer_params=first.prefill(longer))
    assert token_ids(answer) == token_ids(first.complete(longer))


def test_tiers_bring_it_back(pair: tuple[VllmServer, VllmServer], prompt: Prompt) -> None:
    first, second = pair
    ids = prompt(1500)
    expected = token_ids(first.complete(ids))
    assert token_ids(second.complete(ids)) == expected
    forget(second, host=False)
    before = second.metric("vllm:kv_offload_total_bytes_total", transfer_type="CPU_to_GPU")
    assert token_ids(second.complete(ids)) == expected
    assert second.metric("vllm:kv_offload_total_bytes_total", transfer_type="CPU_to_GPU") > before
