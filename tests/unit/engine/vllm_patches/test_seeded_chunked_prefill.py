"""Requests with a seed on a CPU, in steps whose token is dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.worker_base import WorkerWrapperBase

from disagg.engine.vllm_patches import patching, seeded_chunked_prefill


class Runner:
    """Samples as vLLM does: a row with a generator uses it, the others use the common one."""

    def __init__(self, thrown_away: list[bool]) -> None:
        self.discard_request_mask = SimpleNamespace(np=np.array([*thrown_away, True]))
        generators = {row: torch.Generator().manual_seed(row) for row in (0, 2)}
        self.input_batch = SimpleNamespace(num_reqs=len(thrown_away), generators=generators)

    def sample_tokens(self, fails: bool) -> list[float]:
        if fails:
            raise RuntimeError("as told")
        rows = range(self.input_batch.num_reqs)
        for row in rows:
            if self.discard_request_mask.np[row] and row in self.input_batch.generators:
                self.input_batch.generators[row].get_offset()  # vLLM's way to wind it back
        drawn = {row: torch.rand(1, generator=g) for row, g in self.input_batch.generators.items()}
        return [float(drawn.get(row, torch.zeros(1))) for row in rows]


def test_a_generator_is_as_it_was_where_the_token_is_thrown_away() -> None:
    runner, sample = Runner([True, True, False]), seeded_chunked_prefill.apart(Runner.sample_tokens)
    with pytest.raises(RuntimeError, match="CPU Generator does not use offset"):
        runner.sample_tokens(fails=False)
    again = torch.rand(1, generator=torch.Generator().manual_seed(2))
    assert sample(runner, fails=False) == [0.0, 0.0, float(again)]
    with pytest.raises(RuntimeError, match="as told"):
        sample(runner, fails=True)
    assert set(runner.input_batch.generators) == {0, 2}
    runner.discard_request_mask.np[:] = False
    first = torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert sample(runner, fails=False)[0] == float(first)


def test_the_patch_applies_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied twice it is the same: vLLM may load a plugin twice."""
    ran: list[Any] = []
    monkeypatch.setattr(WorkerWrapperBase, "init_device", ran.append)
    monkeypatch.setattr(CPUModelRunner, "sample_tokens", CPUModelRunner.sample_tokens)
    patching.install([seeded_chunked_prefill.PATCH])
    patching.install([seeded_chunked_prefill.PATCH])
    for worker in (1, 2):
        WorkerWrapperBase.init_device(worker)  # type: ignore[arg-type]
    assert ran == [1, 2]
    mended: Any = CPUModelRunner.sample_tokens
    assert mended.is_apart
    assert not hasattr(mended.__wrapped__, "is_apart")
