"""Checks of the memory that engines take: against this machine, and against their longest request.

The machine counts only if the engines run on it: a joined Ray cluster has other nodes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.config import Deployment, Role
from disagg.config_file import show
from disagg.preflight.argument_keys import CPU_BLOCK_DEFAULT, ROLES, described, key_of
from disagg.preflight.engine_checks import env_key, on_gpus
from disagg.preflight.gpu_memory import gpu_bytes, gpus
from disagg.preflight.model_config import ModelConfig, model_config
from disagg.preflight.vllm_args import as_number

_SPACE, _BYTES = "VLLM_CPU_KVCACHE_SPACE", "kv_cache_memory_bytes"
_GIB = 1 << 30
_GPU = "/dev/nvidia0"
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# Models of which each layer keeps all tokens of a request, in heads of one size.
_PLAIN_MODELS = (
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
_WIDTHS = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "fp8": 1}
_AUTO = (None, "auto")


@dataclass(frozen=True)
class KVSpace:
    """The KV cache of each rank of an engine. described: the setting, for the user."""

    size: int
    described: str


def runs_here(deployment: Deployment) -> bool:
    """Whether the engines would run on this machine: no cluster is named, and a file for GPUs is
    not checked on a machine without them."""
    wants_gpus = any(on_gpus(deployment, role) for role in ROLES)
    return not os.environ.get("RAY_ADDRESS") and (not wants_gpus or Path(_GPU).exists())


def memory_problems(deployment: Deployment, *, here: bool) -> Iterator[str]:
    """Caches that cannot be allocated, or that cannot hold one request of full length."""
    lines = [line for role in ROLES for line in _cache_problems(deployment, role, here=here)]
    yield from dict.fromkeys(lines)  # without doubles: a key of the section engine concerns both
    if here and (host := deployment.tiers.host) is not None:
        ranks, total = max(_ranks(deployment, role) for role in ROLES), machine_bytes()
        if host.max_bytes * ranks > total:
            yield (
                f"tiers.host.max_bytes: {host.max_bytes} — of each of {ranks} ranks, and this "
                f"machine has {_gib(total)}; {_ELSEWHERE}"
            )


def memory_warnings(deployments: Sequence[Deployment]) -> Iterator[str]:
    """Engines that together take more than this machine has. Each one may still start.

    `deployments`: those whose engines run on this machine.
    """
    total, cpus, there = machine_bytes(), os.cpu_count() or 1, len(gpus())
    wanted, asked, asked_gpus = 0, 0.0, 0.0
    for deployment in deployments:
        for role in ROLES:
            space = kv_space(deployment, role)
            replicas = deployment.pool(role).replicas * deployment.data_parallel_size(role)
            asked += replicas * deployment.pool(role).resources.num_cpus
            asked_gpus += replicas * deployment.pool(role).resources.num_gpus
            host = deployment.tiers.host.max_bytes if deployment.tiers.host else 0
            own = space.size if space and not on_gpus(deployment, role) else 0
            wanted += replicas * _ranks(deployment, role) * (own + host)
    keys = "prefill.replicas, decode.replicas"
    if len(deployments) > 1:
        keys = f"{keys} of all deployments"
    if wanted > total:
        yield (
            f"{keys}: the engines' KV caches and host tiers take {_gib(wanted)} together, and this "
            f"machine has {_gib(total)}"
        )
    if asked > cpus:
        yield (
            f"{keys}: the engines ask for {asked:g} CPUs, and this machine has {cpus}; without a "
            "Ray cluster that has them, they do not start"
        )
    if 0 < there < asked_gpus:
        yield (
            f"{keys}: the engines ask for {asked_gpus:g} GPUs, and this machine has {there}; "
            "without a Ray cluster that has them, they do not start"
        )


def kv_space(deployment: Deployment, role: Role) -> KVSpace | None:
    """What the user sets, or disagg's default on a CPU; None if vLLM decides it by free memory."""
    given = as_number(_BYTES, deployment.args(role).get(_BYTES))
    of_args = KVSpace(int(given), described(deployment, role, _BYTES)) if given else None
    if on_gpus(deployment, role):
        return of_args
    space = (deployment.engine.env | deployment.pool(role).env).get(_SPACE)
    if space:  # it overrides the argument
        if not space.strip().isdecimal():
            return None  # a wrong value, which is reported elsewhere
        return KVSpace(
            int(space) * _GIB, f"{env_key(deployment, role, _SPACE)}: {show(space)} (GiB)"
        )
    if space is None and of_args is None:
        return KVSpace(_GIB, f"{_SPACE}: not set (1 GiB)")
    return of_args


def machine_bytes() -> int:
    """The memory of this machine, or of the container in which this process runs."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        try:
            limit = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        total = min(total, int(limit)) if limit.isdecimal() else total
    return total


_ELSEWHERE = "lower it; for a cluster with larger nodes, set RAY_ADDRESS"


def _cache_problems(deployment: Deployment, role: Role, *, here: bool) -> Iterator[str]:
    space = kv_space(deployment, role)
    if space is None:
        return
    if here and on_gpus(deployment, role):
        yield from _gpu_problem(space)
    elif here:
        yield from _machine_problem(deployment, role, space)
    yield from _request_problem(deployment, role, space)


def _machine_problem(deployment: Deployment, role: Role, space: KVSpace) -> Iterator[str]:
    ranks, total = _ranks(deployment, role), machine_bytes()
    if space.size * ranks > total:
        each = f"{ranks} ranks of an engine" if ranks > 1 else "an engine"
        yield (
            f"{space.described} — {each} would take {_gib(space.size * ranks)}, and this machine "
            f"has {_gib(total)}; {_ELSEWHERE}"
        )


def _gpu_problem(space: KVSpace) -> Iterator[str]:
    total = gpu_bytes()
    if total is not None and space.size > total:
        yield (
            f"{space.described} — of each rank, and this machine's GPUs have {_gib(total)}; "
            f"{_ELSEWHERE}"
        )


def _request_problem(deployment: Deployment, role: Role, space: KVSpace) -> Iterator[str]:
    args = deployment.args(role)
    model = model_config(deployment, args)
    if model is None or args.get("num_gpu_blocks_override") is not None:
        return
    of_token = _bytes_per_token(model, args)
    length = as_number("max_model_len", args.get("max_model_len"))
    if length is None and model.longest is not None and "rope_type" not in str(model.text):
        length = model.longest[0]
    if of_token is None or length is None or length < 1:
        return
    block = _block_size(deployment, role)
    needed = (math.ceil(length / block) + 1) * block * of_token  # vLLM takes one block for itself
    if needed <= space.size:
        return
    fitting = max(1, (space.size // of_token // block - 1) * block)
    key = key_of(deployment, role, "max_model_len")
    yield (
        f"{key}: {length:.0f} — one request of this length takes {_gib(needed)} of KV cache on "
        f"each rank, and {space.described} is less; set {fitting} or less, or raise it"
    )


def _block_size(deployment: Deployment, role: Role) -> int:
    given = deployment.args(role).get("block_size")
    if isinstance(given, int) and given > 0:
        return given
    return 1 if on_gpus(deployment, role) else CPU_BLOCK_DEFAULT


def _bytes_per_token(model: ModelConfig, args: Mapping[str, Any]) -> int | None:
    """On the rank with the most layers, or less; None where layers may differ."""
    text = model.text
    layers, heads = model.number("num_hidden_layers"), model.number("num_attention_heads")
    kv_heads, hidden = model.kv_heads, model.number("hidden_size")
    slides = text.get("sliding_window") and text.get("use_sliding_window") is not False
    kinds = set(text.get("layer_types") or ())
    if text.get("model_type") not in _PLAIN_MODELS or slides or kinds - {"full_attention"}:
        return None
    width = _width(model, args)
    if not (layers and heads and kv_heads and hidden and width):
        return None
    tensor, stages = (args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    if not (isinstance(tensor, int) and isinstance(stages, int) and min(tensor, stages) > 0):
        return None
    head = model.number("head_dim") or hidden // heads
    return 2 * width * head * max(1, kv_heads // tensor) * math.ceil(layers / stages)


def _width(model: ModelConfig, args: Mapping[str, Any]) -> int | None:
    """Bytes of one number of the KV cache, or less."""
    cache, dtype = args.get("kv_cache_dtype"), args.get("dtype")
    if cache not in _AUTO:
        return _WIDTHS.get(str(cache).split("_")[0])
    if dtype not in _AUTO:
        return _WIDTHS.get(str(dtype))
    own = model.text.get("dtype") or model.text.get("torch_dtype")
    return min(2, _WIDTHS.get(str(own), 2))  # vLLM reads a float32 checkpoint in half of it


def _ranks(deployment: Deployment, role: Role) -> int:
    args = deployment.args(role)
    sizes = [args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def _gib(size: float) -> str:
    return f"{size / _GIB:,.1f} GiB"
