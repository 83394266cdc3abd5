"""Identifies an engine's model, as fields to compare. Reads vLLM's configuration, but does not
import vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from disagg.identity.weights import checkpoint
from disagg.vllm_compat.kv_cache import uses_draft_kv_cache

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_LLAMA4_TUNED = 32768


def model_fields(config: VllmConfig) -> dict[str, str]:
    """The weights, configuration overrides, and the draft whose layers share the cache. Reads
    files."""
    model, overrides = config.model_config, ""
    if callable(model.hf_overrides):
        overrides = f"{model.hf_overrides.__module__}.{model.hf_overrides.__qualname__}"
    elif model.hf_overrides:
        overrides = _json(model.hf_overrides)
    multimodal, speculative = model.multimodal_config, config.speculative_config
    given = multimodal.mm_processor_kwargs if multimodal is not None else None
    draft = ""
    if speculative is not None and uses_draft_kv_cache(speculative):
        of = speculative.draft_model_config
        draft = f"{speculative.method} {checkpoint(of.model, of.revision)}"
    return {
        "checkpoint": checkpoint(model.model, model.revision),
        "hf_overrides": overrides,
        "hf_config_path": checkpoint(model.hf_config_path, None) if model.hf_config_path else "",
        "mm_processor_kwargs": _json(given) if given else "",
        "long_context": _long_context(model),
        "draft": draft,
    }


def kv_cache_dtype(config: VllmConfig) -> str:
    """The setting, with `auto` resolved: it means the model's own dtype."""
    name = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if name == "auto" else name


def _json(given: object) -> str:
    return json.dumps(given, sort_keys=True, default=str)


def _long_context(model: ModelConfig) -> str:
    """Some models compute all prompts differently in vLLM 0.32 if long ones are allowed. For these:
    on which side of that limit `max_model_len` is."""
    limits = []
    text = model.hf_text_config
    if str(text.model_type).startswith("llama4"):
        limits.append(_LLAMA4_TUNED)  # temperature of queries
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            own = getattr(text, "original_max_position_embeddings", None)
            limits.append(rope.get("original_max_position_embeddings", own) or 0)
    sides = [f"{'over' if model.max_model_len > limit else 'up to'} {limit}" for limit in limits]
    return ", ".join(f"max_model_len {one}" for one in dict.fromkeys(sides))
