"""Turns a deployment into the arguments and the environment of one vLLM engine.

Never imports vLLM, so `disagg check` shows the result in milliseconds. The user's values override
the defaults. The deployment's secret and the engines' key must never appear in the arguments:
vLLM logs all arguments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from disagg.config import Deployment
from disagg.engine.spec import EngineSpec
from disagg.engine.vllm_patches.busy_poll import POLL_SLEEP_ENV, POLL_SLEEP_US
from disagg.engine.vllm_patches.fork_workers import FORK_ENV

SECRET_ENV = "DISAGG_SECRET"
KEY_ENV = "VLLM_API_KEY"  # vLLM reads it

# Options of vLLM's server. The user may override them by name.
SERVER_DEFAULTS: dict[str, Any] = {
    "enable_prompt_tokens_details": True,  # usage.prompt_tokens_details.cached_tokens
    "disable_uvicorn_access_log": True,
    "uvicorn_log_level": "warning",
}


def is_cpu(spec: EngineSpec) -> bool:
    """Whether the engine runs on a CPU: it requests no GPU from Ray."""
    return spec.deployment.pool(spec.role).resources.num_gpus == 0


def engine_args(spec: EngineSpec, *, host: str, engine_id: str) -> dict[str, Any]:
    """The engine's arguments, by vLLM's names.

    `host`: the connector's control channel binds to it, unless the YAML sets `transfer.host`.
    `engine_id`: must be unique for every start.
    """
    deployment = spec.deployment
    args = _model_args(deployment) | SERVER_DEFAULTS | {"distributed_executor_backend": "mp"}
    given = deployment.args(spec.role)
    if is_cpu(spec):
        args |= _cpu_args(given)
    args |= given
    args["kv_transfer_config"] = kv_transfer_config(spec, host=host, engine_id=engine_id)
    return {name: value for name, value in args.items() if value is not None}


def _cpu_args(given: dict[str, Any]) -> dict[str, Any]:
    """Defaults on a CPU: no compilation, which needs a C++ toolchain and takes minutes.

    But vLLM 0.32 warms up only compiled models, and on a CPU an engine with pipeline stages fails
    at its first request without a warm-up. So such an engine compiles with the eager backend.
    """
    if given.get("pipeline_parallel_size", 1) == 1:
        return {"enforce_eager": True}
    return {"compilation_config": {"mode": 2, "backend": "eager"}}  # needs no toolchain


def kv_transfer_config(spec: EngineSpec, *, host: str, engine_id: str) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`: the handoff connector, and the offload connector if there are
    tiers."""
    common = {
        "kv_role": "kv_producer" if spec.role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "fail" if spec.deployment.transfer.strict else "recompute",
    }
    handoff, tiers = _handoff(spec, host), _tiers(spec)
    if tiers is None:
        return {**handoff, **common, "engine_id": engine_id}
    return {
        "kv_connector": "MultiConnector",
        **common,
        "engine_id": engine_id,
        "kv_connector_extra_config": {"connectors": [{**c, **common} for c in (handoff, tiers)]},
    }


def _handoff(spec: EngineSpec, host: str) -> dict[str, Any]:
    transfer = spec.deployment.transfer
    # Ranks on several nodes: each rank listens on the address of its own node.
    on_each_node = spec.deployment.spreads_ranks(spec.role) and not spec.loopback
    return {
        "kv_connector": "DisaggConnector",
        "kv_connector_module_path": "disagg.connector",
        "kv_connector_extra_config": {
            "transports": list(transfer.transports),
            "storage_path": spec.storage_path,
            "storage_max_bytes": transfer.storage.max_bytes,
            "storage_fsync": transfer.storage.fsync,
            "storage_checksum": transfer.storage.checksum,
            "staging_bytes": transfer.staging_bytes,
            "lease_s": transfer.lease_s,
            "lease_limit_s": transfer.lease_limit_s,
            "load_deadline_s": transfer.load_deadline_s,
            "host": transfer.host or (None if on_each_node else host),
            "engine_name": spec.name,
            "strict": transfer.strict,
        },
    }


def _tiers(spec: EngineSpec) -> dict[str, Any] | None:
    tiers, extra = spec.deployment.tiers, dict[str, Any]()
    if tiers.host is None and tiers.directory is None:
        return None
    if tiers.host is not None:
        extra |= {"host_bytes": tiers.host.max_bytes, "eviction": tiers.host.eviction}
    if tiers.directory is not None:
        extra |= {
            "directory": str(tiers.directory.path),
            "directory_bytes": tiers.directory.max_bytes,
            "directory_checksum": tiers.directory.checksum,
            "reset_keeps_files": tiers.directory.reset_keeps_files,
        }
    extra |= {
        "blocks_per_chunk": tiers.blocks_per_chunk,
        "staging_bytes": spec.deployment.transfer.staging_bytes,
        "load_deadline_s": spec.deployment.transfer.load_deadline_s,
        "engine_name": spec.name,
    }
    return {
        "kv_connector": "DisaggOffloadConnector",
        "kv_connector_module_path": "disagg.connector.offload",
        "kv_connector_extra_config": extra,
    }


def engine_env(spec: EngineSpec, *, scratch: str) -> dict[str, str]:
    """The engine's environment variables, to be merged into those of its process.

    `scratch`: the engine's folder for vLLM's sockets and rendezvous files. The caller creates and
    removes it.
    """
    deployment = spec.deployment
    pool = deployment.pool(spec.role)
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_RPC_BASE_PATH": scratch, "TMPDIR": scratch}
    if Path(deployment.model.path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if spec.loopback:
        env["VLLM_HOST_IP"] = "127.0.0.1"
    if is_cpu(spec):
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, int(pool.resources.num_cpus))),
            POLL_SLEEP_ENV: POLL_SLEEP_US,
            FORK_ENV: "1",
        }
    else:
        env |= {name: v for name, v in _gpu_env(spec).items() if name not in os.environ}
    args = deployment.args(spec.role)
    if str(args.get("prefix_caching_hash_algo")).startswith("xxhash"):
        env["PYTHONHASHSEED"] = "0"  # else block hashes differ between engines, and nothing matches
    given = {SECRET_ENV: spec.secret, KEY_ENV: spec.engine_key}
    return env | deployment.engine.env | pool.env | given


def _gpu_env(spec: EngineSpec) -> dict[str, str]:
    # More streams than connections share the GPU's hardware queues. There, a transfer that waits
    # for its peer blocks the streams behind it. CUDA's default is 8, its maximum 32.
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if spec.loopback:
        env["NCCL_SOCKET_IFNAME"] = "lo"  # all engines are on this machine
    return env


def _model_args(deployment: Deployment) -> dict[str, Any]:
    model = deployment.model
    args: dict[str, Any] = {"model": model.path, "trust_remote_code": model.trust_remote_code}
    if model.served_name is not None:
        args["served_model_name"] = [model.served_name]
    if model.tokenizer is not None:
        args["tokenizer"] = model.tokenizer
    if model.revision is not None:
        args["revision"] = model.revision
    return args
