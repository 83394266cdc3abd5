"""Turns a deployment into the arguments and the environment of one vLLM engine.

Never imports vLLM, so `disagg check` shows the result in milliseconds. The user's values override
the defaults. The deployment's secret and the engines' key must never appear in the arguments:
vLLM logs all arguments.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from disagg.config import Deployment, Role, TransferSection
from disagg.engine.spec import EngineSpec
from disagg.engine.vllm_patches.busy_poll import POLL_SLEEP_ENV, POLL_SLEEP_US
from disagg.engine.vllm_patches.fork_workers import FORK_ENV
from disagg.vllm_compat.kv_events import are_told

SECRET_ENV = "DISAGG_SECRET"
KEY_ENV = "VLLM_API_KEY"  # vLLM reads it

# Options of vLLM's server. The user may override them by name.
SERVER_DEFAULTS: dict[str, Any] = {
    "enable_prompt_tokens_details": True,  # usage.prompt_tokens_details.cached_tokens
    "disable_uvicorn_access_log": True,
    "uvicorn_log_level": "warning",
}

KV_EVENTS = "kv_events_config"
# Where engines publish if the router hears of their caches. KV events have the prompts' token ids,
# and whoever connects may read them. So on one machine they go through sockets in the engine's own
# folder; else through any free port of the node's address, which vLLM tells.
_HEARD_AT = "tcp://*:0"
_HEARD_IN = "ipc://{scratch}/inproc-{name}"
"""vLLM adds the data parallel rank to names with the word inproc, and fails at others."""
KV_EVENTS_ENDPOINT = "tcp://*:5557"  # vLLM's default
# Room for a replay endpoint at the next port, and for an engine of the other role.
_PORTS_OF_ENGINE, _PORTS_OF_INDEX = 2, 4
# Folders in which vLLM names files by ranks. Each engine gets a folder of its own in them.
_FOLDERS = (("profiler_config", "torch_profiler_dir"), ("compilation_config", "debug_dump_path"))


def is_cpu(spec: EngineSpec) -> bool:
    """Whether the engine runs on a CPU: it requests no GPU from Ray."""
    return spec.deployment.pool(spec.role).resources.num_gpus == 0


def engine_args(
    spec: EngineSpec,
    *,
    host: str,
    engine_id: str,
    meeting: tuple[str, int] = ("", 0),
    scratch: str | None = None,
) -> dict[str, Any]:
    """The engine's arguments, by vLLM's names.

    `host`: the connector's control channel binds to it, unless the YAML sets `transfer.host`.
    `engine_id`: must be unique for every start. `meeting`: the address and the port at which the
    first rank of a data parallel group awaits the others. `scratch`: see `engine_env`.
    """
    deployment = spec.deployment
    args = _model_args(deployment) | SERVER_DEFAULTS | {"distributed_executor_backend": "mp"}
    given = deployment.args(spec.role)
    if _is_heard(deployment, spec.role):
        args[KV_EVENTS] = _heard(scratch if spec.loopback else None)
    if is_cpu(spec):
        args |= _cpu_args(given)
    args |= given | _of_its_own(spec, given)
    if spec.ranks > 1:
        # Each rank is an engine with an API of its own ("external load balancing" to vLLM).
        address, port = meeting
        args |= {
            "data_parallel_rank": spec.rank,
            "data_parallel_address": address,
            "data_parallel_rpc_port": port,
        }
    args["kv_transfer_config"] = kv_transfer_config(spec, host=host, engine_id=engine_id)
    return {name: value for name, value in args.items() if value is not None}


def _is_heard(deployment: Deployment, role: Role) -> bool:
    """Whether the router wants to hear of what these engines' caches hold, and can."""
    pairing = deployment.pairing
    is_wanted = pairing.shares_caches or getattr(pairing, role) == "cache_aware"
    return is_wanted and are_told()


def _heard(folder: str | None) -> dict[str, Any]:
    """`kv_events_config` of an engine that the router hears. `folder`: for its sockets."""
    names = ("endpoint", "replay_endpoint")
    at = {
        name: _HEARD_AT if folder is None else _HEARD_IN.format(scratch=folder, name=name)
        for name in names
    }
    return {"enable_kv_cache_events": True, "publisher": "zmq", **at}


def kv_events(deployment: Deployment, role: Role) -> dict[str, Any] | None:
    """The pool's `kv_events_config`, if its engines publish KV events over ZMQ; else None."""
    config = keys_of(deployment.args(role).get(KV_EVENTS))
    if not config or config.get("enable_kv_cache_events") is not True:
        return None
    return None if config.get("publisher") == "null" else config


def kv_event_endpoints(deployment: Deployment, role: Role, index: int) -> dict[str, str]:
    """The ZMQ addresses of one engine by their names in `kv_events_config`.

    Several engines may run on one node. So each adds its own number to the port that it binds: four
    for each index, and two more for decode if both pools have the same address. An address to which
    vLLM connects, and one whose port the system chooses, remain.
    """
    config = kv_events(deployment, role)
    if config is None:
        return {}
    bound, others = _bound(config), kv_events(deployment, "prefill")
    shared = role == "decode" and not set(bound.values()).isdisjoint(_bound(others).values())
    offset = index * _PORTS_OF_INDEX + shared * _PORTS_OF_ENGINE
    found = {"endpoint": str(config.get("endpoint", KV_EVENTS_ENDPOINT))}
    if isinstance(replay := config.get("replay_endpoint"), str):
        found["replay_endpoint"] = replay
    return {
        key: _moved(address, offset, f"{role}-{index}") if key in bound else address
        for key, address in found.items()
    }


def keys_of(value: Any) -> dict[str, Any] | None:
    """An argument with keys: from YAML, or from JSON text, as on vLLM's command line."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def _bound(config: Mapping[str, Any] | None) -> dict[str, str]:
    """The addresses that vLLM binds, as `vllm/distributed/kv_events.py` decides."""
    if config is None:
        return {}
    endpoint = str(config.get("endpoint", KV_EVENTS_ENDPOINT))
    binds = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
    replay = config.get("replay_endpoint")
    return ({"endpoint": endpoint} if binds else {}) | (
        {"replay_endpoint": replay} if isinstance(replay, str) else {}
    )


def _moved(address: str, offset: int, name: str) -> str:
    if offset == 0:
        return address
    if address.startswith("ipc://"):
        return f"{address}.{name}"
    return _shifted(address, offset)


def _shifted(address: str, offset: int) -> str:
    host, colon, port = address.rpartition(":")
    if not address.startswith("tcp://") or not port.isdecimal() or int(port) == 0:
        return address
    return f"{host}{colon}{int(port) + offset}"


def _of_its_own(spec: EngineSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that would fix an address or a folder for all engines, for this engine alone."""
    made: dict[str, Any] = {}
    if endpoints := kv_event_endpoints(spec.deployment, spec.role, spec.index):
        # vLLM adds the data parallel rank to a port.
        own = {key: _shifted(address, -spec.rank) for key, address in endpoints.items()}
        made[KV_EVENTS] = (keys_of(given[KV_EVENTS]) or {}) | own
    for argument, key in _FOLDERS:
        config = keys_of(given.get(argument))
        if config and isinstance(folder := config.get(key), str) and folder:
            made[argument] = config | {key: os.path.join(folder, spec.name)}
    return made


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
    role = "kv_producer" if spec.role == "prefill" else "kv_consumer"
    common = {
        "kv_role": "kv_both" if spec.deployment.pairing.shares_caches else role,
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


def _nixl(transfer: TransferSection) -> dict[str, Any]:
    """The settings of nixl, where it may be used."""
    if "nixl" not in transfer.transports:
        return {}
    return {f"nixl_{key}": value for key, value in transfer.nixl.model_dump().items()}


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
            **_nixl(transfer),
            "staging_bytes": transfer.staging_bytes,
            "lease_s": transfer.lease_s,
            "lease_limit_s": transfer.lease_limit_s,
            "load_deadline_s": transfer.load_deadline_s,
            "host": transfer.host or (None if on_each_node else host),
            "engine_name": spec.name,
            "strict": transfer.strict,
            "stream": transfer.stream,
        },
    }


def _tiers(spec: EngineSpec) -> dict[str, Any] | None:
    tiers, extra = spec.deployment.tiers, dict[str, Any]()
    if not tiers.any:
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
    if tiers.objects is not None:
        extra["objects"] = tiers.objects.model_dump(mode="json", exclude_none=True)
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


def engine_env(spec: EngineSpec, *, scratch: str, address: str | None = None) -> dict[str, str]:
    """The engine's environment variables, to be merged into those of its process.

    `scratch`: the engine's folder for vLLM's sockets and rendezvous files. The caller creates and
    removes it. `address`: that of its node; None: not known yet.
    """
    deployment = spec.deployment
    pool = deployment.pool(spec.role)
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_RPC_BASE_PATH": scratch, "TMPDIR": scratch}
    if Path(deployment.model.path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if spec.loopback:
        env["VLLM_HOST_IP"] = "127.0.0.1"
    if address is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        env |= _gloo_env(spec, address)
    args = deployment.args(spec.role)
    if is_cpu(spec):
        if args.get("kv_cache_memory_bytes") is None:  # the variable would override it
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, int(pool.resources.num_cpus))),
            POLL_SLEEP_ENV: POLL_SLEEP_US,
            FORK_ENV: "1",
        }
    else:
        env |= {name: v for name, v in _gpu_env(spec).items() if name not in os.environ}
    if str(args.get("prefix_caching_hash_algo")).startswith("xxhash"):
        env["PYTHONHASHSEED"] = "0"  # else block hashes differ between engines, and nothing matches
    given = {SECRET_ENV: spec.secret, KEY_ENV: spec.engine_key}
    return env | deployment.engine.env | pool.env | given


def _gloo_env(spec: EngineSpec, address: str) -> dict[str, str]:
    """Where gloo listens, over which CPU ranks compute and GPU ranks meet.

    Gloo's default is the address of the host's own name. That may be 127.0.1.1, which no other
    host reaches, or one of a network, for ranks that are all on this host.
    """
    if spec.deployment.spreads_ranks(spec.role):
        return {}  # vLLM starts these ranks, each on its own node
    there = "127.0.0.1" if spec.ranks == 1 or spec.loopback else address
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == there for one in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _gpu_env(spec: EngineSpec) -> dict[str, str]:
    # More streams than connections share the GPU's hardware queues. There, a transfer that waits
    # for its peer blocks the streams behind it. CUDA's default is 8, its maximum 32.
    env, host = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, spec.deployment.transfer.host
    if spec.loopback:
        env["NCCL_SOCKET_IFNAME"] = "lo"  # all engines are on this machine
    elif host and host in [name for _, name in socket.if_nameindex()]:
        env["NCCL_SOCKET_IFNAME"] = f"={host}"  # exactly this one; else NCCL takes it as a prefix
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
