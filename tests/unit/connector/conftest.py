"""Tests that import vLLM and start no engine. Not collected where vLLM is not installed."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
