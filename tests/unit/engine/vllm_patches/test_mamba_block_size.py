"""Blocks of recurrent state on a CPU: their size, and no state stored in the middle of a step."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.worker_base import WorkerWrapperBase

from disagg.engine.vllm_patches import mamba_block_size, patching
from disagg.testing.checkpoint import make_model
from disagg.vllm_compat import versions

PLATFORM: Any = type(current_platform)
STORES_WITHIN_STEPS = mamba_block_size.CHECKPOINTS.is_for(versions.installed())


def test_blocks_keep_their_size_once_they_are_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's engine process reads its config once, and again after the setup."""
    make_model(tmp_path / "model")
    config = EngineArgs(str(tmp_path / "model"), dtype="float32").create_engine_config()
    cache, mended = config.cache_config, PLATFORM.check_and_update_config
    assert cache.block_size == 128
    cache.block_size = 256
    config.__post_init__()
    assert cache.block_size == 128  # nothing is allocated yet, and 128 is a CPU's default
    cache.num_gpu_blocks, cache.block_size = 10, 256
    config.__post_init__()
    assert cache.block_size == 256
    monkeypatch.setattr(PLATFORM, "check_and_update_config", staticmethod(mended.__wrapped__))
    config.__post_init__()
    assert cache.block_size == 128  # else vLLM no longer needs the patch


def test_the_patch_is_for_versions_whose_layers_store_states_within_a_step() -> None:
    assert (
        "num_prefill_checkpoint_blocks" in inspect.getsource(MambaMixer2)
    ) == STORES_WITHIN_STEPS


@pytest.mark.skipif(not STORES_WITHIN_STEPS, reason="this vLLM's layers store none")
def test_no_layer_stores_a_state_within_a_step() -> None:
    attention = FullAttentionSpec(block_size=256, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(
        block_size=256,
        shapes=((2, 4),),
        dtypes=(torch.float32,),
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
    )
    said = mamba_block_size.between_steps(lambda runner: runner.specs)(
        SimpleNamespace(specs={"attention": attention, "mamba": state})
    )
    assert said["attention"] is attention
    assert (said["mamba"].num_prefill_checkpoint_blocks, said["mamba"].shapes) == (0, ((2, 4),))
    assert said["mamba"].prefill_checkpoint_alignment is None


def test_the_patch_applies_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied twice it is the same: vLLM may load a plugin twice."""
    ran: list[Any] = []
    monkeypatch.setattr(WorkerWrapperBase, "init_device", ran.append)
    monkeypatch.setattr(CPUModelRunner, "get_kv_cache_spec", CPUModelRunner.get_kv_cache_spec)
    update = staticmethod(PLATFORM.check_and_update_config)
    monkeypatch.setattr(PLATFORM, "check_and_update_config", update)
    patching.install([mamba_block_size.BLOCK_SIZE, mamba_block_size.CHECKPOINTS])
    patching.install([mamba_block_size.BLOCK_SIZE, mamba_block_size.CHECKPOINTS])
    WorkerWrapperBase.init_device(1)  # type: ignore[arg-type]
    assert ran == [1]
    mended = [PLATFORM.check_and_update_config]
    if STORES_WITHIN_STEPS:
        mended.append(CPUModelRunner.get_kv_cache_spec)
    else:
        assert not hasattr(CPUModelRunner.get_kv_cache_spec, "is_between_steps")
    for once in mended:
        assert not {"keeps_blocks", "is_between_steps"} & {*vars(once.__wrapped__)}
