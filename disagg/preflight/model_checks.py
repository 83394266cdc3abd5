"""Checks of the checkpoint, and of engine arguments against its `config.json`.

The rules are those of vLLM 0.32. Keys that the file does not have are never guessed, and nothing is
said of a model that is not on this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.config import Deployment, Role, is_local
from disagg.config_file import show
from disagg.engine.args import keys_of
from disagg.preflight import vllm_source
from disagg.preflight.argument_keys import ROLES, described, key_of
from disagg.preflight.vllm_args import as_number

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
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
# Rotary scalings whose factor the length contains already (vllm/config/model.py).
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_TOKENIZERS = ("token*", "tekken*", "vocab*", "merges*", "*.model", "*.tiktoken")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_INDEX = "model.safetensors.index.json"
_CHECKPOINT_FORMATS = (None, "auto", "hf", "safetensors")
_COUNTED_DRAFTS = ("ngram", "ngram_gpu", "draft_model")


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


def checkpoint_problems(deployment: Deployment) -> Iterator[str]:
    """Of the folders of the model and its tokenizer."""
    model = deployment.model
    found = list(_folder_problems("model.path", model.path, "config.json"))
    yield from found
    if model.tokenizer is not None:
        yield from _folder_problems("model.tokenizer", model.tokenizer, "tokenizer_config.json")
    if found or not is_local(model.path):
        return
    yield from _config_problems("model.path", model.path)
    lines = [line for role in ROLES for line in _file_problems(deployment, role)]
    yield from dict.fromkeys(lines)


def model_problems(deployment: Deployment, role: Role) -> Iterator[str]:
    """Of one pool's arguments, against the model and its draft."""
    args = deployment.args(role)
    target = model_config(deployment, args)
    if target is not None:
        yield from _length_problem(deployment, role, target)
        yield from _rank_problems(deployment, role, target)
        yield from _kind_problems(deployment, role, target)
    yield from _draft_problems(deployment, role)


def model_config(deployment: Deployment, args: Mapping[str, Any]) -> ModelConfig | None:
    """Of the model with these arguments; None if it is not here."""
    given = args.get("hf_config_path")
    path = given if isinstance(given, str) else deployment.model.path
    overrides = keys_of(args.get("hf_overrides")) or {}
    return _read(_folder(path, None if given else deployment.model.revision), overrides)


# ---- the checkpoint's files ----------------------------------------------------------------


def _folder_problems(key: str, checkpoint: str, needed: str) -> Iterator[str]:
    if not is_local(checkpoint):
        return  # a name on a model hub, which only the engine can resolve
    path = Path(checkpoint)
    if not path.exists():
        yield (
            f"{key}: {checkpoint!r} — no such folder; correct it, or make a checkpoint with: "
            f"disagg make-model {checkpoint}"
        )
    elif not (path / needed).is_file():
        yield f"{key}: {checkpoint!r} — holds no {needed}; name a checkpoint's folder"


def _config_problems(key: str, checkpoint: str) -> Iterator[str]:
    try:
        content = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"{key}: {checkpoint!r} — its config.json can't be read ({error}); copy it again"
        return
    if not isinstance(content, dict):
        yield f"{key}: {checkpoint!r} — its config.json holds no keys; copy it again"


def _file_problems(deployment: Deployment, role: Role) -> Iterator[str]:
    model, args = deployment.model, deployment.args(role)
    path = Path(model.path)
    has_tokenizer = any(next(path.glob(pattern), None) for pattern in _TOKENIZERS)
    if not model.tokenizer and not args.get("skip_tokenizer_init") and not has_tokenizer:
        yield (
            f"model.path: {model.path!r} — holds no tokenizer; copy its files there, or set "
            "model.tokenizer"
        )
    if args.get("load_format") not in _CHECKPOINT_FORMATS or args.get("model_weights"):
        return
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        yield (
            f"model.path: {model.path!r} — holds no weights ({', '.join(_WEIGHTS)}); copy them "
            "there, or set load_format"
        )
    elif missing := _missing_shards(path):
        yield (
            f"model.path: {model.path!r} — {len(missing)} files of {_INDEX} are missing, such as "
            f"{missing[0]}; copy them there"
        )


def _missing_shards(path: Path) -> list[str]:
    if next(path.glob("*.safetensors"), None) is None or not (path / _INDEX).is_file():
        return []
    try:
        shards = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []
    return sorted({str(shard) for shard in shards if not (path / str(shard)).is_file()})


# ---- the model's config.json ---------------------------------------------------------------


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


# ---- rules ---------------------------------------------------------------------------------


def _length_problem(deployment: Deployment, role: Role, model: ModelConfig) -> Iterator[str]:
    wanted = as_number("max_model_len", deployment.args(role).get("max_model_len"))
    env = os.environ | deployment.engine.env | deployment.pool(role).env
    if wanted is None or model.longest is None or env.get(_ALLOW_LONG, "0") not in ("", "0"):
        return
    longest, key = model.longest
    if wanted > longest:
        yield (
            f"{described(deployment, role, 'max_model_len')} — the model's config.json has {key} "
            f"{longest:.0f}; set {longest:.0f} or less, or remove it"
        )


def _rank_problems(deployment: Deployment, role: Role, model: ModelConfig) -> Iterator[str]:
    args = deployment.args(role)
    tensor, stages = (args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    if isinstance(tensor, int) and tensor > 1:
        key = described(deployment, role, "tensor_parallel_size")
        yield from _head_problems(key, "model", model, tensor)
    layers = model.number("num_hidden_layers", "n_layer", "n_layers")
    if isinstance(stages, int) and layers is not None and stages > layers:
        yield (
            f"{described(deployment, role, 'pipeline_parallel_size')} — the model has {layers} "
            f"layers, and each stage needs one; set {layers} or less"
        )


def _head_problems(key: str, whose: str, model: ModelConfig, ranks: int) -> Iterator[str]:
    heads, kv_heads = model.number(*_HEADS), model.kv_heads
    if heads is None or heads < 1:
        return
    fitting = [
        str(n)
        for n in range(1, heads + 1)
        if heads % n == 0 and (not kv_heads or kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if heads % ranks:
        yield (
            f"{key} — must divide the {heads} attention heads of the {whose}; "
            f"set one of {', '.join(fitting)}"
        )
    elif kv_heads and kv_heads % ranks and ranks % kv_heads:
        yield (
            f"{key} — must divide the {kv_heads} KV heads of the {whose}, or be a multiple; "
            f"set one of {', '.join(fitting)}"
        )


def _kind_problems(deployment: Deployment, role: Role, model: ModelConfig) -> Iterator[str]:
    args = deployment.args(role)
    kind = model.whole.get("model_type")
    if args.get("dtype") in ("half", "float16") and kind in _not_in_float16():
        yield (
            f"{described(deployment, role, 'dtype')} — vLLM refuses it for models of type {kind}; "
            "set bfloat16 or float32"
        )
    configs = model.whole.get("block_configs") or model.text.get("block_configs")
    experts = any(model.text.get(name) or model.whole.get(name) for name in _EXPERTS)
    if args.get("enable_expert_parallel") is True and not experts and not configs:
        yield (
            f"{described(deployment, role, 'enable_expert_parallel')} — the model's config.json "
            "names no experts; remove it"
        )


def _not_in_float16() -> tuple[str, ...]:
    package = vllm_source.root()
    source = vllm_source.source(package / "config/model.py") if package else None
    return source.names("_FLOAT16_NOT_SUPPORTED_MODELS") if source else ()


def _draft_problems(deployment: Deployment, role: Role) -> Iterator[str]:
    args = deployment.args(role)
    draft = keys_of(args.get("speculative_config"))
    if not draft:
        return
    key = key_of(deployment, role, "speculative_config")
    if draft.get("method") in _COUNTED_DRAFTS and draft.get("num_speculative_tokens") is None:
        yield f"{key}.num_speculative_tokens: not set — the draft guesses this many; set it"
    ranks = args.get("tensor_parallel_size", 1)
    ranks = ranks if isinstance(ranks, int) else 1
    own = draft.get("draft_tensor_parallel_size")
    if own is not None and own not in (1, ranks):
        yield (
            f"{key}.draft_tensor_parallel_size: {show(own)} — must be 1 or the model's "
            f"tensor_parallel_size; set one of {', '.join(map(str, sorted({1, ranks})))}"
        )
        return
    path = draft.get("model")
    if not isinstance(path, str) or draft.get("method") in (*_COUNTED_DRAFTS[:2], "custom_class"):
        return
    if problems := list(_folder_problems(f"{key}.model", path, "config.json")):
        yield from problems
        return
    model, split = _read(_folder(path, draft.get("revision")), {}), own or ranks
    if model is not None and split > 1:
        name = "tensor_parallel_size" if own is None else "draft_tensor_parallel_size"
        shown = described(deployment, role, name) if own is None else f"{key}.{name}: {own}"
        yield from _head_problems(shown, "draft", model, split)
