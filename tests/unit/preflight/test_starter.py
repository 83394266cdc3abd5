"""What `disagg init` and `disagg serve MODEL` choose for a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from disagg import config
from disagg.errors import ConfigError
from disagg.preflight.starter import Machine, deployment, is_missing, write, written

GIB = 1 << 30
SMALL = Machine(2, 24 * GIB, ())
LARGE = Machine(64, 512 * GIB, ())


def gpus(count: int) -> Machine:
    return Machine(32, 256 * GIB, (80 * GIB,) * count)


@pytest.mark.parametrize("machine", [SMALL, LARGE, gpus(1), gpus(2), gpus(8)], ids=str)
@pytest.mark.parametrize("model", ["org/Some.Model_1B", "/models/other/", "x" * 80])
def test_each_is_a_valid_file_and_fits(machine: Machine, model: str) -> None:
    for prefill, decode in ((1, 1), (2, 3)):
        content = deployment(model, machine, prefill=prefill, decode=decode, port=0)
        (one,) = config.read(content)
        assert (one.prefill.replicas, one.decode.replicas) == (prefill, decode)
        engines = prefill + decode
        if machine.gpus:
            used = sum(one.pool(role).resources.num_gpus * one.pool(role).replicas
                       for role in ("prefill", "decode"))  # fmt: skip
            assert 0 < used <= max(len(machine.gpus), engines * (used / engines))
            share = one.prefill.resources.num_gpus
            assert used <= len(machine.gpus) + 0.01
            if share < 1:
                assert one.engine.args["gpu_memory_utilization"] <= share
        else:
            space = int(one.engine.env["VLLM_CPU_KVCACHE_SPACE"])
            assert space >= 1
            assert space * GIB * engines <= machine.memory / 2


def test_the_file_reads_as_the_deployment(tmp_path: Path) -> None:
    text = written(deployment("org/name", SMALL), SMALL)
    assert yaml.safe_load(text) == deployment("org/name", SMALL)
    assert "2 cores, 24 GiB, no GPU" in text
    path = tmp_path / "d.yaml"
    write(path, "org/name", SMALL, replace=False)
    assert config.load(path).model.path == "org/name"
    with pytest.raises(ConfigError, match="--force"):
        write(path, "org/name", SMALL, replace=False)
    write(path, "org/other", SMALL, replace=True)
    assert config.load(path).model.path == "org/other"
    with pytest.raises(ConfigError, match="can't be written"):
        write(tmp_path / "none" / "d.yaml", "org/name", SMALL, replace=False)


def test_engines_share_few_cores() -> None:
    assert deployment("m/m", SMALL)["engine"]["env"]["OMP_NUM_THREADS"] == 1
    assert "OMP_NUM_THREADS" not in deployment("m/m", LARGE)["engine"]["env"]


def test_only_folders_can_be_missing(tmp_path: Path) -> None:
    assert is_missing(str(tmp_path / "none"))
    assert not is_missing(str(tmp_path))
    assert not is_missing("org/name")
