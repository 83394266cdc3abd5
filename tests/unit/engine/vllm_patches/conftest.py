"""Tests of patches. Not collected where vLLM is not installed."""

from __future__ import annotations

import importlib.util

from unit.connector.conftest import distributed, model

__all__ = ["distributed", "model"]

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
