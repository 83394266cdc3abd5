"""Tests that import vLLM and start no engine. Not collected where vLLM is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.testing.checkpoint import make_model

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What vLLM's connectors ask for their rank, and a secret."""
    from unit.connector.modelless import one_rank

    from disagg.transport.control.secret import SECRET_VARIABLE

    with one_rank(tmp_path_factory.mktemp("distributed")), pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET_VARIABLE, "correct horse battery")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, layers=2, hidden=16, kv_heads=2, head_dim=8)
    return path
