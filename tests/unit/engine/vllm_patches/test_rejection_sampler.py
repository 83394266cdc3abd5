"""Sampling where tokens are guessed, and where no guess is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

from disagg.engine.vllm_patches import rejection_sampler as patches


@pytest.fixture(autouse=True)
def as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have applied the patches in this process."""
    for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
        found = getattr(rejection_sampler, name)
        monkeypatch.setattr(rejection_sampler, name, getattr(found, "__wrapped__", found))


@pytest.fixture
def mended() -> None:
    patches.expand_in_torch()
    patches.expand_in_torch()


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("counted", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.bool])
def test_each_token_has_its_requests_value(dtype: torch.dtype, counted: torch.dtype) -> None:
    x = torch.tensor([0.5, 0.0, 1.25, 3.0]).to(dtype)
    ends = torch.tensor([2, 3, 3, 6], dtype=counted)  # the third request has no draft tokens
    expected = torch.stack([x[0], x[0], x[1], x[3], x[3], x[3]])
    found = rejection_sampler.expand_batch_to_tokens(x, ends, 6)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("mended")
def test_one_value_is_replaced() -> None:
    x, ends = torch.tensor([0.0, 0.8]), torch.tensor([1, 3], dtype=torch.int32)
    found = rejection_sampler.expand_batch_to_tokens(x, ends, 3, replace_from=0, replace_to=1)
    assert torch.equal(found, torch.tensor([1.0, 0.8, 0.8]))


def test_vllm_still_has_the_fault() -> None:
    """Else the patch can go."""
    x, ends = torch.tensor([0.25, 0.75]), torch.tensor([1, 2], dtype=torch.int32)
    found = torch.full((2,), 9.0)
    cpu_triton_utils._expand_kernel_impl(found, x, ends, 0, 0)
    assert not torch.equal(found, x)


@pytest.mark.usefixtures("mended")
def test_no_guesses() -> None:
    """A request with a top_k, whose guesses were all refused."""
    metadata: Any = SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor([0.5]),
        top_k=torch.tensor([3], dtype=torch.int32),
        top_p=None,
    )
    asked = (torch.empty(0, 16), torch.tensor([0], dtype=torch.int32), metadata)
    with pytest.raises(RuntimeError, match="max"):  # else the patch can go
        rejection_sampler.apply_sampling_constraints(*asked)
    patches.sample_without_guesses()
    patches.sample_without_guesses()
    assert rejection_sampler.apply_sampling_constraints(*asked).shape == (0, 16)
    logits = rejection_sampler.apply_sampling_constraints(
        torch.arange(16.0)[None], torch.tensor([1], dtype=torch.int32), metadata
    )
    assert (logits > float("-inf")).sum() == 3
