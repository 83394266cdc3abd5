"""What a patch states, and what happens if it cannot be applied."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.worker_base import WorkerWrapperBase

from disagg.engine import plugin as old_plugin
from disagg.engine.vllm_patches import patching, plugin, seeded_chunked_prefill, worker_shutdown
from disagg.errors import ConfigError
from disagg.vllm_compat import versions

OURS = KVTransferConfig(
    kv_connector="DisaggConnector", kv_connector_module_path="disagg.connector", kv_role="kv_both"
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No patch has failed. vLLM's start of workers is restored afterwards."""
    monkeypatch.setattr(patching, "_failed", {})
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda worker: None)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines of vLLM's log about patches."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    patching.logger.addHandler(handler)
    yield said
    patching.logger.removeHandler(handler)


def config_of(model: Path) -> VllmConfig:
    args = EngineArgs(model=str(model), max_model_len=64, enforce_eager=True)
    config = args.create_engine_config()
    config.kv_transfer_config = OURS
    return config


@pytest.mark.parametrize("patch", plugin.ALL, ids=lambda patch: str(patch.name))
def test_each_states_its_fault_versions_report_and_end(patch: patching.Patch) -> None:
    SpecifierSet(patch.versions)
    assert patch.fault.endswith(".")
    assert patch.report
    assert patch.until
    assert patch.is_for("0.32.0")


@pytest.mark.parametrize("patch", plugin.MENDS, ids=lambda patch: str(patch.name))
def test_a_mend_is_off_where_its_fault_is_not_known(patch: patching.Patch) -> None:
    """Those for CPUs end with the newest build for CPUs."""
    assert not patch.is_for("0.28.0")
    assert not patch.is_for("0.34.0")
    assert not patch.is_for("0.33.0") or patch is worker_shutdown.PATCH
    assert patch.is_for("0.32.1.dev3+g1234abc")


def test_the_version_of_the_cpu_build_is_found() -> None:
    import vllm

    assert versions.installed() == vllm.__version__


def test_outside_its_versions_nothing_is_changed(lines: list[str]) -> None:
    before = WorkerWrapperBase.init_device
    patching.install([seeded_chunked_prefill.PATCH], "0.34.0")
    assert WorkerWrapperBase.init_device is before
    assert lines == []


def test_one_that_cannot_be_applied_is_one_line(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """A vLLM without the class or function to change: workers start, and the log has one line."""
    monkeypatch.delattr("vllm.v1.worker.cpu_model_runner.CPUModelRunner")
    patching.install([seeded_chunked_prefill.PATCH])
    assert lines == []
    WorkerWrapperBase.init_device(None)  # type: ignore[arg-type]
    (line,) = lines
    what = f"seeded_chunked_prefill cannot be applied to vLLM {versions.installed()} (ImportError"
    assert what in line
    assert "one request with a seed" in line


def test_an_engine_that_needs_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: Path, lines: list[str]
) -> None:
    config = config_of(model)
    patching.require(config)
    monkeypatch.delattr("vllm.v1.worker.cpu_model_runner.CPUModelRunner")
    patching.install([seeded_chunked_prefill.PATCH])
    WorkerWrapperBase.init_device(None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=f"vLLM {versions.installed()}: .* patch seeded_chunked_prefill"
    ):
        patching.require(config)


def test_an_engine_that_does_not_need_it_starts(
    monkeypatch: pytest.MonkeyPatch, model: Path, lines: list[str]
) -> None:
    """A Llama does not need the patch for MLA models."""
    monkeypatch.delattr("vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding")
    patching.install(plugin.MENDS)
    WorkerWrapperBase.init_device(None)  # type: ignore[arg-type]
    assert [line for line in lines if "mla_rotary" in line]
    patching.require(config_of(model))


def test_the_plugin_never_raises(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Here vLLM even lacks the class that starts every worker."""
    monkeypatch.delattr("vllm.v1.worker.worker_base.WorkerWrapperBase")
    plugin.install()
    assert len(lines) == len({line.split()[3] for line in lines}) >= 3


def test_the_plugin_of_0_1_is_the_same() -> None:
    """Environments that were installed with 0.1 still load it by its old name."""
    assert old_plugin.install is plugin.install


def test_a_patch_reads_like_a_record(lines: list[str]) -> None:
    def broken() -> None:
        raise KeyError("gone")

    fields: dict[str, Any] = {"fault": "x.", "versions": "", "report": "r", "until": "u"}
    patching.install([patching.Patch("p", apply=broken, **fields)], "1.2.3")
    assert lines == ["disagg: the patch p cannot be applied to vLLM 1.2.3 (KeyError: 'gone'). "
                     "Without it: x."]  # fmt: skip
