"""Mends how vLLM samples where it guesses tokens, on a CPU.

`expand_to_tokens`: each request's temperature, top_k and top_p become one per guess. Instead of the
Triton kernel for it, vLLM's CPU engines call a function that writes into a copy whenever the tensor
is not int64, and rounds to integers besides. So the settings are what was in memory before: where
greedy and sampled requests share a batch, greedy ones get wrong tokens too.

`no_guesses`: a grammar may refuse all guesses of a step. If a request of that step has a top_k,
vLLM asks for the largest of none, and the engine dies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disagg.engine.vllm_patches.patching import Patch, on_cpu

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

Expand = Callable[..., Any]


def expand_in_torch() -> None:
    """Change vLLM's rejection sampler on CPUs."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = without_kernel(
        rejection_sampler.expand_batch_to_tokens
    )


def without_kernel(expand: Expand) -> Expand:
    """As vLLM's: x of each request becomes x of each of its tokens, [requests] -> [tokens]."""
    if hasattr(expand, "is_without_kernel"):
        return expand  # plugins may be loaded twice

    @functools.wraps(expand)
    def expanded(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        replaced = x.masked_fill(x == replace_from, replace_to)
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    expanded.is_without_kernel = True  # type: ignore[attr-defined]
    return expanded


def sample_without_guesses() -> None:
    """Change vLLM's rejection sampler on CPUs."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.apply_sampling_constraints = unless_empty(
        rejection_sampler.apply_sampling_constraints
    )


def unless_empty(constrain: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's top_k and top_p of all guesses: logits of shape [guesses, vocabulary]."""
    if hasattr(constrain, "is_unless_empty"):
        return constrain

    @functools.wraps(constrain)
    def constrained(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return constrain(logits, *args, **kwargs) if logits.shape[0] else logits

    constrained.is_unless_empty = True  # type: ignore[attr-defined]
    return constrained


def _is_needed(config: VllmConfig) -> bool:
    is_cpu: bool = config.device_config.device_type == "cpu"
    return is_cpu and config.speculative_config is not None


EXPAND = Patch(
    "expand_to_tokens",
    fault="with a draft model, greedy and sampled requests of one batch get wrong tokens on a CPU.",
    versions=">=0.29,<0.33",
    report="none that we know of",
    until="vLLM's stand-in for `expand_kernel` writes to its output, in the output's dtype",
    apply=expand_in_torch,
    when=on_cpu,
    needed=_is_needed,
    in_workers=True,
)
NO_GUESSES = Patch(
    "no_guesses",
    fault="an engine that guesses tokens dies when a grammar refuses all guesses of a step in "
    "which a request has a top_k.",
    versions=">=0.29,<0.33",
    report="none that we know of",
    until="vLLM's `apply_top_k_only` takes no rows",
    apply=sample_without_guesses,
    when=on_cpu,
    needed=_is_needed,
    in_workers=True,
)
