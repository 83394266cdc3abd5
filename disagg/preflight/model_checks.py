"""Checks of the checkpoint, and of engine arguments against its `config.json`.

The rules are those of vLLM 0.32. Keys that the file does not have are never guessed, and nothing is
said of a model that is not on this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from disagg.config import FOLDER_ENV, Deployment, Role, is_local
from disagg.config_file import show
from disagg.engine.args import keys_of
from disagg.models.catalogue import MODELS
from disagg.preflight import vllm_source
from disagg.preflight.argument_keys import ROLES, described, key_of
from disagg.preflight.model_config import ModelConfig, model_config, read_config
from disagg.preflight.vllm_args import as_number

_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_TOKENIZERS = ("token*", "tekken*", "vocab*", "merges*", "*.model", "*.tiktoken")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_INDEX = "model.safetensors.index.json"
_CHECKPOINT_FORMATS = (None, "auto", "hf", "safetensors")
# A part of the path of Ray's copies of working folders.
_RAYS_COPY = "working_dir_files"
_COUNTED_DRAFTS = ("ngram", "ngram_gpu", "draft_model")


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


# ---- the checkpoint's files ----------------------------------------------------------------


def _folder_problems(
    key: str, checkpoint: str, needed: str, *, is_draft: bool = False
) -> Iterator[str]:
    if not is_local(checkpoint):
        return  # a name on a model hub, which only the engine can resolve
    path = Path(checkpoint)
    if not path.exists():
        yield f"{key}: {checkpoint!r} — no such folder; {_remedy(path, is_draft=is_draft)}"
    elif not (path / needed).is_file():
        yield f"{key}: {checkpoint!r} — holds no {needed}; name a checkpoint's folder"


def _remedy(path: Path, *, is_draft: bool) -> str:
    if _RAYS_COPY in path.parts:
        return (
            "a Ray job runs in a copy of its working folder: give an absolute path that the nodes "
            f"have, or set {FOLDER_ENV} to the folder in which relative paths start"
        )
    if path.name in MODELS:
        return f"get it with: disagg get-model {path.name}"
    return "correct it" + ("" if is_draft else f", or make one with: disagg make-model {path}")


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
    if experts or configs:
        return
    if args.get("enable_expert_parallel") is True:
        yield (
            f"{described(deployment, role, 'enable_expert_parallel')} — the model's config.json "
            "names no experts; remove it"
        )
    if (ranks := deployment.data_parallel_size(role)) > 1:
        yield (
            f"{described(deployment, role, 'data_parallel_size')} — the model's config.json names "
            "no experts, and without them such ranks share nothing, so vLLM refuses them; remove "
            f"it, and set the pool's replicas to {ranks * deployment.pool(role).replicas}"
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
    if problems := list(_folder_problems(f"{key}.model", path, "config.json", is_draft=True)):
        yield from problems
        return
    model, split = read_config(path, draft.get("revision")), own or ranks
    if model is not None and split > 1:
        name = "tensor_parallel_size" if own is None else "draft_tensor_parallel_size"
        shown = described(deployment, role, name) if own is None else f"{key}.{name}: {own}"
        yield from _head_problems(shown, "draft", model, split)
