"""Checks of one pool's engine arguments together, and of its environment.

Each rule is one of vLLM 0.32 or of the connector, which would refuse the engine at its start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from disagg.config import Deployment, Role, is_local
from disagg.config_file import show
from disagg.engine.args import keys_of
from disagg.preflight.argument_keys import described, key_of
from disagg.preflight.vllm_args import as_number

# vllm/config/vllm.py: drafts that asynchronous scheduling cannot run.
_SYNCHRONOUS_DRAFTS = ("ngram", "suffix", "medusa", "mlp_speculator", "custom_class")
_MAX_LORA_RANK = 16  # vllm/config/lora.py
_ADAPTER = "adapter_config.json"
# Of each engine's own; with one value for all, engines on a node collide or mix their files.
_SHARED_ENV = {
    "PROMETHEUS_MULTIPROC_DIR": "engines would count each other's metrics",
    "VLLM_DP_MASTER_PORT": "engines are no data parallel ranks of each other",
    "VLLM_DP_RANK": "engines are no data parallel ranks of each other",
    "VLLM_DP_RANK_LOCAL": "engines are no data parallel ranks of each other",
    "VLLM_DP_SIZE": "engines are no data parallel ranks of each other",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME": "engines on one node would share the buffer",
}
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def engine_problems(deployment: Deployment, role: Role) -> Iterator[str]:
    """All problems of one pool's arguments with each other."""
    for rule in _RULES:
        yield from rule(deployment, role, deployment.args(role))


def environment_problems(deployment: Deployment, role: Role) -> Iterator[str]:
    """All problems of one pool's environment variables."""
    env = deployment.engine.env | deployment.pool(role).env
    for name, reason in _SHARED_ENV.items():
        if name in env:
            key = env_key(deployment, role, name)
            yield f"{key}: {show(env[name], name)} — {reason}; remove it"
    if "VLLM_PORT" in env and not deployment.spreads_ranks(role):
        yield (
            f"{env_key(deployment, role, 'VLLM_PORT')}: {show(env['VLLM_PORT'])} — engines on one "
            "node would race for the same ports; remove it"
        )
    if on_gpus(deployment, role):
        yield from _allocator_problem(deployment, role, env)
    elif env.get(_KV_SPACE) and not env[_KV_SPACE].strip().isdecimal():
        yield (
            f"{env_key(deployment, role, _KV_SPACE)}: {show(env[_KV_SPACE])} — must be a whole "
            "number of GiB; for less, remove it and set kv_cache_memory_bytes"
        )


def env_key(deployment: Deployment, role: Role, name: str) -> str:
    """The variable's path in the file."""
    return f"{role}.env.{name}" if name in deployment.pool(role).env else f"engine.env.{name}"


def on_gpus(deployment: Deployment, role: Role) -> bool:
    """Whether the pool's engines run on GPUs."""
    return deployment.pool(role).resources.num_gpus > 0


def _allocator_problem(deployment: Deployment, role: Role, env: Mapping[str, str]) -> Iterator[str]:
    allocator = env.get(_ALLOCATOR, "")
    args = deployment.args(role)
    moves = not args.get("enable_cumem_allocator") and not args.get("enable_sleep_mode")
    if "expandable_segments:True" in allocator and moves:
        yield (
            f"{env_key(deployment, role, _ALLOCATOR)}: {show(allocator)} — expandable segments "
            "move the KV cache, so vLLM refuses them with a connector; remove it, or set "
            "enable_cumem_allocator"
        )


# ---- rules ---------------------------------------------------------------------------------

_Args = Mapping[str, Any]


def _needs(name: str, other: str, fix: str) -> Callable[[Deployment, Role, _Args], Iterator[str]]:
    """A rule: the first argument is useless, and vLLM refuses it, without the other one."""

    def rule(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
        if args.get(name) not in (None, False) and not args.get(other):
            yield f"{described(deployment, role, name)} — needs {other}; {fix}"

    return rule


def _at_most(name: str, other: str) -> Callable[[Deployment, Role, _Args], Iterator[str]]:
    """A rule: of two numbers that are given, the first must not exceed the second."""

    def rule(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
        number, most = as_number(name, args.get(name)), as_number(other, args.get(other))
        if number is not None and most is not None and -1 < most < number:
            yield (
                f"{described(deployment, role, name)} — {described(deployment, role, other)}: "
                f"{name} must be at most {other}; set {most:.0f} or less"
            )

    return rule


def _batched_tokens(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
    if args.get("enable_chunked_prefill") is False:
        yield from _at_most("max_model_len", "max_num_batched_tokens")(deployment, role, args)


def _metrics(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
    if not args.get("disable_log_stats"):
        return
    described_ = described(deployment, role, "disable_log_stats")
    if args.get("enable_per_request_metrics"):
        yield f"{described_} — metrics of each request need it; remove one of them"
    if deployment.pool(role).autoscale is not None:
        yield f"{described_} — {role}.autoscale follows these metrics; remove one of them"


def _sleep(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
    if args.get("enable_sleep_mode") is True:
        yield (
            f"{described(deployment, role, 'enable_sleep_mode')} — a sleeping engine gives up the "
            "memory that other engines may still read, and ends with the first read; remove it"
        )
    for name in ("enable_cumem_allocator", "enable_eplb"):
        if args.get(name) is True and not on_gpus(deployment, role):
            yield f"{described(deployment, role, name)} — needs GPUs; remove it, or set num_gpus"


def _executor(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
    backend = args.get("distributed_executor_backend")
    if backend == "external_launcher":
        key = key_of(deployment, role, "distributed_executor_backend")
        yield f"{key}: {show(backend)} — engines start their own ranks; set mp or ray"
    ranks = [args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    # On a CPU, vLLM takes mp instead.
    if (
        backend == "uni"
        and on_gpus(deployment, role)
        and any(isinstance(size, int) and size > 1 for size in ranks)
    ):
        key = key_of(deployment, role, "distributed_executor_backend")
        yield f"{key}: {show(backend)} — runs one rank, and the engine has several; set mp"


def _drafts(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
    speculative = keys_of(args.get("speculative_config")) or {}
    key, method = key_of(deployment, role, "speculative_config"), speculative.get("method")
    if method == "extract_hidden_states":
        yield f"{key}.method: {show(method)} — hidden states are not handed off; remove it"
    if method in _SYNCHRONOUS_DRAFTS and args.get("async_scheduling") is True:
        yield (
            f"{described(deployment, role, 'async_scheduling')} — cannot run the draft "
            f"{show(method)}; remove it"
        )


def _prefix_caching(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
    tiers = deployment.tiers
    if args.get("enable_prefix_caching") is False and tiers.any:
        yield (
            f"{described(deployment, role, 'enable_prefix_caching')} — tiers find blocks by the "
            "hashes of prefix caching; remove it, or the tiers"
        )


def _profiler(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
    config = keys_of(args.get("profiler_config")) or {}
    key = key_of(deployment, role, "profiler_config")
    torch, folder = config.get("profiler") == "torch", config.get("torch_profiler_dir")
    if torch and not folder:
        yield f"{key}.torch_profiler_dir: not set — the profiler torch writes to it; set it"
    elif folder and not torch:
        yield f"{key}.torch_profiler_dir: {show(folder)} — needs profiler: torch; set it"


def _adapters(deployment: Deployment, role: Role, args: _Args) -> Iterator[str]:
    modules, key = args.get("lora_modules"), key_of(deployment, role, "lora_modules")
    if args.get("enable_lora"):
        yield from _at_most("max_loras", "max_cpu_loras")(deployment, role, args)
    if not isinstance(modules, list):
        return
    most = as_number("max_lora_rank", args.get("max_lora_rank", _MAX_LORA_RANK))
    for number, module in enumerate(modules):
        yield from _adapter_problem(f"{key}.{number}", module, most)


def _adapter_problem(key: str, module: Any, most: float | None) -> Iterator[str]:
    name, path = _name_and_path(module)
    if not name or not path:
        yield f'{key}: {show(module)} — must be text: "NAME=PATH", or JSON with name and path'
        return
    if not is_local(path):
        return  # a name on a model hub
    adapter = Path(path) / _ADAPTER
    if not adapter.is_file():
        yield f"{key}: {show(module)} — {path} holds no {_ADAPTER}; name an adapter's folder"
        return
    try:
        rank = json.loads(adapter.read_text(encoding="utf-8")).get("r")
    except (OSError, ValueError, AttributeError) as error:
        yield f"{key}: {show(module)} — {adapter} can't be read ({error}); mend it"
        return
    if isinstance(rank, int) and most is not None and rank > most:
        yield f"{key}: {show(module)} — its rank is {rank}; set max_lora_rank to {rank} or more"


def _name_and_path(module: Any) -> tuple[str | None, str | None]:
    """As vLLM's command line reads it. Any other value is refused there."""
    if not isinstance(module, str):
        return None, None
    if "=" in module and "," not in module:
        before, _, after = module.partition("=")
        return before, os.path.expanduser(after)
    found = keys_of(module) or {}
    name, path = found.get("name"), found.get("path")
    return (name, path) if isinstance(name, str) and isinstance(path, str) else (None, None)


_RULES: tuple[Callable[[Deployment, Role, _Args], Iterator[str]], ...] = (
    _needs("enable_auto_tool_choice", "tool_call_parser", "set the model's parser"),
    _needs("enable_log_outputs", "enable_log_requests", "set it to true"),
    _needs("enable_eplb", "enable_expert_parallel", "set it to true"),
    _needs("numa_bind_nodes", "numa_bind", "set it to true"),
    _needs("numa_bind_cpus", "numa_bind", "set it to true"),
    _needs("lora_modules", "enable_lora", "set it to true"),
    _at_most("max_num_seqs", "max_num_batched_tokens"),
    _at_most("max_num_active_seqs", "max_num_seqs"),
    _at_most("long_prefill_token_threshold", "max_model_len"),
    _batched_tokens,
    _metrics,
    _sleep,
    _executor,
    _drafts,
    _prefix_caching,
    _profiler,
    _adapters,
)
