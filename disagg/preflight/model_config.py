"""A model's `config.json`, as far as the checks need it.

Keys that the file does not have are never guessed, and a model that is not on this machine has no
configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.config import Deployment, is_local
from disagg.engine.args import keys_of

_TEXT = ("text_config", "llm_config", "language_config")
# vllm/transformers_utils/model_arch_config_convertor.py, in its order.
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Rotary scalings whose factor the length contains already (vllm/config/model.py).
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's `config.json`. text: the part of its language model."""

    whole: Mapping[str, Any]
    text: Mapping[str, Any]

    def number(self, *names: str) -> int | None:
        """The first whole number of these names in the language model's part."""
        found = (self.text.get(name) for name in names)
        return next((n for n in found if isinstance(n, int) and not isinstance(n, bool)), None)

    @property
    def kv_heads(self) -> int | None:
        """Of the whole model; None for latent attention, which vLLM does not split by heads."""
        return None if self.text.get("kv_lora_rank") else self.number("num_key_value_heads")

    @property
    def longest(self) -> tuple[float, str] | None:
        """The largest `max_model_len` that vLLM accepts, and the key that sets it."""
        own = self.number("model_max_length")
        lengths = {name: n for name in _LENGTHS if (n := self.number(name)) is not None}
        if not lengths or str(self.whole.get("model_type", "")).startswith("moss"):
            return None
        key = "model_max_length" if own else min(lengths, key=lambda name: lengths[name])
        if "gemma3" in str(self.text.get("model_type")):
            return lengths[key], key  # scaled already
        factors = [factor for rope in self._ropes() for factor in _factors(rope)]
        return lengths[key] * max([1.0, *factors]), key

    def _ropes(self) -> Iterator[Mapping[str, Any]]:
        for name in ("rope_parameters", "rope_scaling"):
            rope = self.text.get(name)
            if isinstance(rope, dict):
                yield rope
                yield from (inner for inner in rope.values() if isinstance(inner, dict))


def model_config(deployment: Deployment, args: Mapping[str, Any]) -> ModelConfig | None:
    """Of the model with these arguments; None if it is not here."""
    given = args.get("hf_config_path")
    path = given if isinstance(given, str) else deployment.model.path
    overrides = keys_of(args.get("hf_overrides")) or {}
    return _read(_folder(path, None if given else deployment.model.revision), overrides)


def read_config(checkpoint: str, revision: str | None = None) -> ModelConfig | None:
    """Of a checkpoint; None if it is not here."""
    return _read(_folder(checkpoint, revision), {})


def _folder(checkpoint: str, revision: str | None) -> Path | None:
    """The checkpoint's folder, or its snapshot in the cache of the model hub."""
    if is_local(checkpoint):
        return Path(checkpoint)
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    repository = cache / f"models--{checkpoint.replace('/', '--')}"
    try:
        commit = (repository / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision or ""
    folder = repository / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def _read(folder: Path | None, overrides: Mapping[str, Any]) -> ModelConfig | None:
    if folder is None:
        return None
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    whole = _merged(content, overrides)
    text = next((whole[name] for name in _TEXT if isinstance(whole.get(name), dict)), whole)
    return ModelConfig(whole, text)


def _merged(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(content)
    for name, value in overrides.items():
        inner = merged.get(name)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[name] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def _factors(rope: Mapping[str, Any]) -> Iterator[float]:
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if kind not in _SCALED and isinstance(factor, int | float):
        yield factor
