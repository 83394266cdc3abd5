"""Requests' settings, one for each draft token."""

from __future__ import annotations

import pytest
import torch
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

from disagg.engine.vllm_patches import expand_to_tokens


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    expand = rejection_sampler.expand_batch_to_tokens
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)
    expand_to_tokens.expand_in_torch()
    expand_to_tokens.expand_in_torch()


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
