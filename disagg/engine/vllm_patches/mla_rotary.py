"""Lets CPU engines rotate queries and keys that come head by head: those of MLA models.

Where a model's rotations are not scaled, vLLM 0.32's kernel for CPUs takes each row of its input
for a token. MLA layers give [tokens, heads, width]: the first token's heads get the rotations of
the first positions, most of the others' none at all. Such an engine answers wrong, and otherwise to
a prompt that it continues, handed over or from its own cache, than to one that it computes whole.

Must never change an engine on GPUs, nor what the kernel does right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from disagg.engine.vllm_patches import patching

Rotate = Callable[..., Any]


def install() -> None:
    """In each process of vLLM's that may become a CPU engine's worker."""
    patching.in_cpu_workers(_mend)


def _mend() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = by_head(RotaryEmbedding.forward_cpu)  # type: ignore[method-assign]


def by_head(rotate: Rotate) -> Rotate:
    """vLLM's rotation; of what comes head by head, as it does it without kernels."""
    if hasattr(rotate, "is_by_head"):
        return rotate

    @functools.wraps(rotate)
    def is_by_head(rotations: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() == 2:  # [tokens, heads * width]
            return rotate(rotations, positions, query, key)
        return rotations.forward_native(positions, query, key)

    is_by_head.is_by_head = True  # type: ignore[attr-defined]
    return is_by_head
