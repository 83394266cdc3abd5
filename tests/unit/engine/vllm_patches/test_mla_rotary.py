"""Rotary embeddings on a CPU of queries and keys with a dimension of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

from disagg.engine.vllm_patches import mla_rotary, patching

HEADS, WIDTH, CONTENT = 4, 64, 128


@pytest.fixture(params=[False, True], ids=["interleaved", "halves"])
def rope(request: pytest.FixtureRequest) -> RotaryEmbedding:
    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        return RotaryEmbedding(WIDTH, WIDTH, 512, 10000.0, request.param, torch.float32)


def rotated(rope: RotaryEmbedding, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The definition, in double: pairs (interleaved or one of each half) turn by their angles."""
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(0, WIDTH, 2).double() / WIDTH)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    x = x.double()
    if rope.is_neox_style:
        return torch.cat(torch.view_as_real(torch.complex(*x.chunk(2, -1)) * turn).unbind(-1), -1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_each_head_of_each_token_turns(rope: RotaryEmbedding, tokens: int) -> None:
    """As in MLA layers: parts of wider rows, one key for all heads."""
    draw = torch.Generator().manual_seed(tokens)
    positions = torch.randint(0, 512, (tokens,), generator=draw)
    query = torch.randn(tokens, HEADS, CONTENT + WIDTH, generator=draw)[..., CONTENT:]
    key = torch.randn(tokens, 512 + WIDTH, generator=draw)[:, 512:].unsqueeze(1)
    right = rotated(rope, positions, query), rotated(rope, positions, key)
    mended = mla_rotary.by_head(RotaryEmbedding.forward_cpu)
    for seen, wanted in zip(mended(rope, positions, query, key), right, strict=True):
        torch.testing.assert_close(seen.double(), wanted, atol=1e-4, rtol=0)
    wrong, _ = RotaryEmbedding.forward_cpu(rope, positions, query.clone(), key.clone())
    assert not torch.allclose(wrong.double(), right[0], atol=0.1)  # else the patch is not needed


def test_rows_of_all_heads_are_the_kernels(rope: RotaryEmbedding) -> None:
    positions = torch.tensor([7, 300, 8])
    query, key = torch.randn(3, HEADS * WIDTH), torch.randn(3, WIDTH)
    right = rotated(rope, positions, query.view(3, HEADS, WIDTH)).flatten(1)
    given, _ = mla_rotary.by_head(RotaryEmbedding.forward_cpu)(rope, positions, query, key)
    assert given is query  # the kernel works in place
    torch.testing.assert_close(given.double(), right, atol=1e-4, rtol=0)


def test_the_patch_applies_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied twice it is the same: vLLM may load a plugin twice."""
    ran: list[Any] = []
    monkeypatch.setattr(WorkerWrapperBase, "init_device", ran.append)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    patching.install([mla_rotary.PATCH])
    patching.install([mla_rotary.PATCH])
    for worker in (1, 2):
        WorkerWrapperBase.init_device(worker)  # type: ignore[arg-type]
    assert ran == [1, 2]
    mended: Any = RotaryEmbedding.forward_cpu
    assert mended.is_by_head
    assert not hasattr(mended.__wrapped__, "is_by_head")
