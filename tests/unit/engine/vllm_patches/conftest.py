"""Tests of patches. Not collected where vLLM is not installed."""

from __future__ import annotations

import importlib.util

from unit.connector.conftest import distributed, model

from disagg.vllm_compat import versions

__all__ = ["distributed", "model"]

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
# Patches of CPU engines are off where there is no build for CPUs.
collect_ignore = [
    f"test_{name}.py"
    for name in ("mamba_block_size", "mla_rotary", "patching", "seeded_chunked_prefill")
    if versions.matches(">=0.33")
]
