"""Mends CPU engines of MLA models whose rotary embeddings are not scaled.

vLLM's CPU kernel takes each row of its input for a token. MLA layers give [tokens, heads,
width]. So the first token's heads get the rotations of the first positions, and most other heads
get none. The engine answers wrong. It also answers differently to a prompt that it continues,
after a handoff or from its own cache, than to a prompt that it computes whole.

Must never change an engine on GPUs, nor what the kernel does right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disagg.engine.vllm_patches.patching import Patch, on_cpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Rotate = Callable[..., Any]


def rotate_by_head() -> None:
    """Change vLLM's rotary embedding on CPUs."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = by_head(RotaryEmbedding.forward_cpu)  # type: ignore[method-assign]


def by_head(rotate: Rotate) -> Rotate:
    """vLLM's rotation. Inputs with a dimension of heads take its way without kernels."""
    if hasattr(rotate, "is_by_head"):
        return rotate

    @functools.wraps(rotate)
    def is_by_head(rotations: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() == 2:  # [tokens, heads * width]
            return rotate(rotations, positions, query, key)
        return rotations.forward_native(positions, query, key)

    is_by_head.is_by_head = True  # type: ignore[attr-defined]
    return is_by_head


def _is_needed(config: VllmConfig) -> bool:
    return config.device_config.device_type == "cpu" and bool(config.model_config.use_mla)


PATCH = Patch(
    "mla_rotary",
    fault="MLA models without scaled rotary embeddings answer wrong on a CPU.",
    versions=">=0.29,<0.33",
    report="none that we know of; the same fault of the CUDA kernel was mended by "
    "https://github.com/vllm-project/vllm/pull/12777",
    until="vLLM's CPU kernel takes [tokens, heads, width]",
    apply=rotate_by_head,
    when=on_cpu,
    needed=_is_needed,
    in_workers=True,
)
