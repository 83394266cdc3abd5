"""The memory that vLLM's profile leaves free for transfers: vLLM's own code on a fake GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker import gpu_worker, startup_plan
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import WorkerWrapperBase

from disagg.connector.handoff.settings import NCCL_RESERVE_BYTES
from disagg.engine.vllm_patches import kv_memory_headroom, patching
from disagg.errors import ConfigError

GIB, MIB = 1 << 30, 1 << 20
TOTAL, MODEL = 80 * GIB, 20 * GIB
STAGING = 96 * MIB


def connector(name: str = "DisaggConnector", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": "disagg.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


STATES = connector("HiddenStatesConnector")
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def several(*children: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class Profile:
    """vLLM's measurement of a model that takes 20 GiB."""

    non_kv_cache_memory = total_consumed = MODEL
    transient_peak_headroom = 0
    after_profile = SimpleNamespace(free_memory=TOTAL - MODEL)


@contextmanager
def measured(*_: object, **__: object) -> Iterator[Profile]:
    yield Profile()


def engine(model: Path, transfer: dict[str, Any] | None, **args: Any) -> UniProcExecutor:
    """vLLM's executor and GPU worker after the model was loaded."""
    config: VllmConfig = EngineArgs(
        model=str(model),
        max_model_len=64,
        enforce_eager=True,
        gpu_memory_utilization=0.95,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        **args,
    ).create_engine_config()
    config.device_config.device_type = "cuda"
    # vLLM has its own default for CPUs.
    config.cache_config.kv_cache_memory_bytes = args.get("kv_cache_memory_bytes")
    worker: Any = gpu_worker.Worker.__new__(gpu_worker.Worker)
    worker.vllm_config, worker.cache_config = config, config.cache_config
    worker.model_config, worker.parallel_config = config.model_config, config.parallel_config
    worker.rank = 0
    worker.model_runner = SimpleNamespace(model_memory_usage=MODEL, profile_run=lambda **_: None)
    worker.init_snapshot = SimpleNamespace(free_memory=TOTAL, total_memory=TOTAL, device_="cuda:0")
    worker.requested_memory = request_memory(worker.init_snapshot, config.cache_config)
    executor = UniProcExecutor.__new__(UniProcExecutor)
    executor.vllm_config = config
    executor.driver_worker = WorkerWrapperBase()
    executor.driver_worker.worker = worker
    return executor


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> kv_memory_headroom.Measure:
    monkeypatch.setattr(gpu_worker, "memory_profiling", measured)
    return kv_memory_headroom.leaving_room(Executor.determine_available_memory)


FOUND = int(TOTAL * 0.95) - MODEL


@pytest.mark.parametrize(
    ("transfer", "left"),
    [
        (None, 0),
        (NIXL, 0),
        (STATES, 0),
        (connector(), 64 * MIB + NCCL_RESERVE_BYTES),
        (connector(staging_bytes=STAGING), STAGING + NCCL_RESERVE_BYTES),
        (connector(staging_bytes=STAGING, transports=["cuda_ipc", "tcp"]), STAGING),
        (several(connector(staging_bytes=STAGING), STATES), STAGING + NCCL_RESERVE_BYTES),
        (several(NIXL, STATES), 0),
    ],
)
def test_memory_for_the_cache(
    model: Path, measure: kv_memory_headroom.Measure, transfer: dict[str, Any] | None, left: int
) -> None:
    assert measure(engine(model, transfer)) == [pytest.approx(FOUND - left, abs=1)]


def test_one_log_line(
    model: Path, measure: kv_memory_headroom.Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(patching.logger, "info", lambda text, *args: said.append(text % args))
    measure(engine(model, connector(transports=["tcp"])))
    measure(engine(model, NIXL))
    assert said == ["64 MiB of each GPU are left free for transfers"]


def test_the_users_setting_stays(model: Path, measure: kv_memory_headroom.Measure) -> None:
    assert measure(engine(model, connector(), kv_cache_memory_bytes=5 * GIB)) == [5 * GIB]


def test_cpu_engines_are_not_changed(model: Path, measure: kv_memory_headroom.Measure) -> None:
    executor = engine(model, connector())
    executor.vllm_config.device_config.device_type = "cpu"
    assert measure(executor) == [pytest.approx(FOUND, abs=1)]


def test_a_plan_that_vllm_saved_at_an_earlier_start(
    model: Path,
    measure: kv_memory_headroom.Measure,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """vLLM shares saved plans between engines with and without our connector. So a plan is of the
    whole memory."""
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(startup_plan, "compute_plan_fingerprint", lambda *_: "plan")
    executor = engine(model, connector(transports=["tcp"]))
    startup_plan.maybe_save_startup_plan(cast("Any", executor.driver_worker.worker), 30 * GIB)
    assert measure(executor) == [30 * GIB - 64 * MIB]


def test_wrong_settings_are_named(model: Path, measure: kv_memory_headroom.Measure) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.staging_bytes: 0"):
        measure(engine(model, connector(staging_bytes=0)))


def test_installed_once_and_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Executor.determine_available_memory
    monkeypatch.setattr(Executor, "determine_available_memory", before)  # put back afterwards
    patching.install([kv_memory_headroom.PATCH])
    assert Executor.determine_available_memory is before
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    patching.install([kv_memory_headroom.PATCH])
    patching.install([kv_memory_headroom.PATCH])
    assert Executor.determine_available_memory.__wrapped__ is before
