"""Checks of the two pools' engine arguments, alone and together.

Each check yields one line per problem: the key's path in the file, the value, the fix. vLLM's names
come from `disagg.preflight.vllm_args` only; this module must never import or start vLLM. It leaves
to the engine what only vLLM can check: attention backends, hybrid caches, memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from disagg.config import Deployment, EngineSection, PoolSection, Role
from disagg.engine.args import KEY_ENV, KV_EVENTS, SECRET_ENV, kv_event_endpoints
from disagg.preflight.argument_checks import argument_problems
from disagg.preflight.argument_keys import CPU_BLOCK_DEFAULT, ROLES, described, key_of
from disagg.preflight.engine_checks import engine_problems, environment_problems
from disagg.preflight.model_checks import model_problems
from disagg.preflight.vllm_args import ArgType, as_number

_CPU_BLOCK_MULTIPLE = 32  # vllm/v1/attention/backends/cpu_attn.py, supported kernel block sizes

_ONLY_ONE = (
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)
_STAGES = "pipeline_parallel_size"
_RANKS = ("tensor_parallel_size", _STAGES)
_MUST_AGREE: Mapping[str, Any] = {
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "block_size": None,
    "quantization": None,
    "prefix_caching_hash_algo": "sha256",
    "hf_overrides": None,
    "enable_lora": False,
    "lora_modules": None,
}
_DRAFTS_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
_SAME_DTYPE = {"half": "float16", "float": "float32"}


def pool_problems(deployment: Deployment, known: Mapping[str, ArgType] | None) -> Iterator[str]:
    """All problems of the arguments and environment of the pools.

    `known` None (vLLM is not installed): names and types are not checked.
    """
    sections: dict[str, EngineSection | PoolSection] = {
        "engine": deployment.engine,
        "prefill": deployment.prefill,
        "decode": deployment.decode,
    }
    for section, values in sections.items():
        yield from argument_problems(f"{section}.args", values.args, known)
        if SECRET_ENV in values.env:
            yield f"{section}.env.{SECRET_ENV}: set by disagg; set transfer.secret_env instead"
        if KEY_ENV in values.env:
            yield f"{section}.env.{KEY_ENV}: set by disagg; set router.api_keys_env instead"
    alone = [
        line
        for role in ROLES
        for rules in (_engine_problems, engine_problems, environment_problems, model_problems)
        for line in rules(deployment, role)
    ]
    yield from dict.fromkeys(alone)  # without doubles: a key of engine.args concerns both roles
    yield from _disagreements(deployment)


def _engine_problems(deployment: Deployment, role: Role) -> Iterator[str]:
    args = deployment.args(role)
    num_gpus = deployment.pool(role).resources.num_gpus
    for name in _ONLY_ONE:
        if args.get(name, 1) != 1:
            key = key_of(deployment, role, name)
            yield f"{key}: {args[name]} — such blocks can't be handed off; set 1 or remove it"
    yield from _block_size_problem(deployment, role, args.get("block_size"))
    if deployment.spreads_ranks(role) and not num_gpus:
        key = key_of(deployment, role, "distributed_executor_backend")
        yield f"{key}: 'ray' — vLLM's Ray executor needs GPUs; remove it, or set num_gpus"
    yield from _data_parallel_problems(deployment, role)
    sizes = {name: args.get(name, 1) for name in _RANKS}
    if not all(isinstance(size, int) for size in sizes.values()):
        return  # a wrong type, which is reported elsewhere
    ranks = math.prod(sizes.values())
    larger = [name for name, size in sizes.items() if size > 1]
    if num_gpus and 1 < ranks != num_gpus:
        given = " and ".join(
            f"{key_of(deployment, role, name)} is {sizes[name]}" for name in larger
        )
        yield f"{role}.resources.num_gpus: {num_gpus:g} — {given}; set num_gpus to {ranks}"
    if sizes[_STAGES] > 1 and not num_gpus and args.get("enforce_eager") is True:
        yield (
            f"{key_of(deployment, role, 'enforce_eager')}: True — with it, an engine with pipeline "
            "stages fails at its first request on CPU; remove it"
        )


def _data_parallel_problems(deployment: Deployment, role: Role) -> Iterator[str]:
    if (ranks := deployment.data_parallel_size(role)) == 1:
        return
    key = key_of(deployment, role, "data_parallel_size")
    if deployment.spreads_ranks(role):
        yield (
            f"{key}: {ranks} — Ray places each data parallel rank whole on one node; remove "
            "distributed_executor_backend"
        )
    addresses = kv_event_endpoints(deployment, role, 0).values()
    if any(address.startswith("ipc://") for address in addresses):
        yield f"{key}: {ranks} — vLLM numbers the ranks' ports; set tcp addresses in {KV_EVENTS}"


def _block_size_problem(deployment: Deployment, role: Role, block_size: Any) -> Iterator[str]:
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        return  # unset, or a wrong type, which is reported elsewhere
    key = key_of(deployment, role, "block_size")
    if block_size < 1:
        yield f"{key}: {block_size} — must be at least 1"
    elif deployment.pool(role).resources.num_gpus == 0 and block_size % _CPU_BLOCK_MULTIPLE:
        nearest_up = -(-block_size // _CPU_BLOCK_MULTIPLE) * _CPU_BLOCK_MULTIPLE
        yield (
            f"{key}: {block_size} — vLLM on CPU needs a multiple of {_CPU_BLOCK_MULTIPLE}; "
            f"set {nearest_up}"
        )


def _disagreements(deployment: Deployment) -> Iterator[str]:
    prefill, decode = (deployment.pool(role).resources.num_gpus > 0 for role in ROLES)
    if prefill != decode:
        yield (
            "prefill.resources.num_gpus, decode.resources.num_gpus: blocks have different layouts "
            "on GPUs and on CPUs; run both pools on GPUs, or both on CPUs"
        )
        return
    defaults = dict(_MUST_AGREE)
    ours, theirs = (deployment.args(role) for role in ROLES)
    if not prefill:
        defaults["block_size"] = CPU_BLOCK_DEFAULT
    else:
        del defaults["block_size"]
        yield from _uneven_blocks(deployment, ours.get("block_size"), theirs.get("block_size"))
    for name, default in defaults.items():
        values = [_canonical(name, args.get(name), default) for args in (ours, theirs)]
        if values[0] != values[1]:
            keys = [described(deployment, role, name) for role in ROLES]
            yield (
                f"{keys[0]} — {keys[1]}: they must be equal, or no block can be exchanged; "
                f"set only engine.args.{name}"
            )
    ours_drafts, theirs_drafts = (_draft(args) for args in (ours, theirs))
    if ours_drafts != theirs_drafts:
        keys = [described(deployment, role, "speculative_config") for role in ROLES]
        yield (
            f"{keys[0]} — {keys[1]}: this draft has a KV cache, so both roles need it, or no block "
            "can be exchanged; set only engine.args.speculative_config"
        )
    longest, taken = (
        as_number("max_model_len", args.get("max_model_len")) for args in (ours, theirs)
    )
    if longest is not None and taken is not None and 0 < taken < longest:
        yield (
            f"{described(deployment, 'decode', 'max_model_len')} — "
            f"{described(deployment, 'prefill', 'max_model_len')}: decode must accept every "
            f"prompt that prefill accepts; set {longest:.0f} or more"
        )


def _uneven_blocks(deployment: Deployment, ours: Any, theirs: Any) -> Iterator[str]:
    if type(ours) is not int or type(theirs) is not int or min(ours, theirs) < 1:
        return  # vLLM chooses, or the value is wrong, which is reported elsewhere
    if max(ours, theirs) % min(ours, theirs):
        keys = [described(deployment, role, "block_size") for role in ROLES]
        yield f"{keys[0]} — {keys[1]}: one must divide the other; set only engine.args.block_size"


def _draft(args: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Method and model of the engine's draft, if the draft has a KV cache; else None."""
    speculative = args.get("speculative_config")
    if not isinstance(speculative, dict) or speculative.get("method") in _DRAFTS_WITHOUT_CACHE:
        return None
    return speculative.get("method"), speculative.get("model")


def _canonical(name: str, value: Any, default: Any) -> Any:
    value = default if value is None else value
    return _SAME_DTYPE.get(value, value) if name == "dtype" else value
