"""The vLLM plugin's name in 0.1. An environment that was installed with that release loads it.

Goes with 0.3.
"""

from __future__ import annotations

from disagg.engine.vllm_patches.plugin import install

__all__ = ["install"]
