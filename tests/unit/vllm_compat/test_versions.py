"""The range of vLLM's versions, and which of them exchange blocks."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from disagg.vllm_compat import versions

ROOT = Path(__file__).parents[3]


def test_pyproject_states_the_same_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in ("cpu", "gpu"):
        needed = (Requirement(line) for line in extras[extra])
        (vllm,) = (one for one in needed if one.name in versions.DISTRIBUTIONS)
        assert vllm.specifier == SpecifierSet(versions.RANGE)


@pytest.mark.parametrize("vllm", ["0.29.0", "0.31.2", "0.32.0+cpu", "0.33.1rc1", "0.33.0.post1"])
def test_versions_that_run(vllm: str) -> None:
    assert versions.problem(vllm) is None


@pytest.mark.parametrize("vllm", ["0.28.3", "0.34.0", "0.34.0rc1", "1.0", "0", "from-a-branch"])
def test_others_are_one_line_that_says_what_to_do(vllm: str) -> None:
    said = versions.problem(vllm)
    assert said is not None
    assert said.startswith(f"vLLM {vllm} is installed — ")
    assert "pip install 'vllm" in said
    assert versions.RANGE in said
    assert "\n" not in said


def test_a_connector_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from disagg.connector.handoff.connector import DisaggConnector
    from disagg.errors import ConfigError

    monkeypatch.setattr(versions, "installed", lambda: "0.34.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0 is installed — .*pip install"):
        DisaggConnector(None, KVConnectorRole.WORKER, None)  # type: ignore[arg-type]


def test_versions_with_the_same_blocks_have_one_name() -> None:
    same = {versions.blocks_of(vllm) for vllm in ("0.29.0", "0.31.1", "0.32.0+cpu")}
    assert len(same) == 1
    assert versions.blocks_of("0.33.0") == "0.33.0"
    assert versions.blocks_of("0.40.0+cpu") == "0.40.0"


def test_no_version_has_two_names() -> None:
    for minor in range(60):
        vllm = f"0.{minor}.0"
        assert sum(versions.matches(one, vllm) for _, one in versions.SAME_BLOCKS) <= 1
