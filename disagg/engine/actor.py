"""The Ray actor around one vLLM engine.

vLLM's start blocks for a minute. So the engine runs in a thread with an event loop of its own, and
the actor's loop stays free: `progress`, `log_tail` and `stop` always answer. No vLLM exception
leaves the actor, because its type may not unpickle in another process. Failures are returned as
`EngineFailure`. vLLM's processes never outlive the actor: they are in its process group, and
`guardian` ends that group.
"""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import uvloop
from prometheus_client.core import Metric

from disagg.engine import guardian, load, logs
from disagg.engine.args import engine_args, engine_env
from disagg.engine.load import EngineLoad
from disagg.engine.ray_metrics import RayMetrics
from disagg.engine.request_log import open_request_log
from disagg.engine.server import bind, metrics, run_engine, url_of
from disagg.engine.spec import EngineFailure, EngineHome, EngineInfo, EngineSpec
from disagg.vllm_compat.kv_events import KvEventAddresses

TAIL_LINES = 40


class EngineActor:
    """Hosts one engine from `start` to `stop`. The engine starts once, however many callers ask."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._log = _own_log()
        scratch = tempfile.mkdtemp(prefix="disagg-ipc-")
        # Ray makes each worker the leader of a process group. Older versions of Ray do not.
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        self._guardian_pid = guardian.spawn(Path(scratch))
        self._scratch = scratch
        self._address = "127.0.0.1" if spec.loopback else _node_address()
        os.environ.update(engine_env(spec, scratch=scratch, address=self._address))
        open_request_log(enabled=spec.deployment.router.access_log)
        context = ray.get_runtime_context()
        if spec.deployment.spreads_ranks(spec.role):
            # vLLM's engine process connects to Ray again. Without an address it starts its own Ray.
            os.environ["RAY_ADDRESS"] = context.gcs_address
        self._node_id = context.get_node_id()
        self._info: EngineInfo | None = None
        self._failure: EngineFailure | None = None
        self._began = time.monotonic()
        self._grace_s = 0.0
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine_loop: asyncio.AbstractEventLoop | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._leader: Any = None
        # Bound and not listening: no other process gets the port before vLLM binds it too.
        self._meeting = bind(self._address) if spec.ranks > 1 and spec.rank == 0 else None

    async def home(self) -> EngineHome:
        """The node, address and processes of this engine. Answers before vLLM is imported."""
        return EngineHome(
            self._node_id, self._address, os.getpid(), self._guardian_pid, str(self._log)
        )

    async def meeting(self) -> tuple[str, int]:
        """Where the first rank of a data parallel group awaits the others."""
        assert self._meeting is not None
        host, port = self._meeting.getsockname()[:2]
        return host, port

    async def start(self, leader: Any = None) -> EngineInfo | EngineFailure:
        """Start the engine, or join its start. Returns when the engine serves or has failed.

        `leader`: the actor of the first rank of its data parallel group; None for that rank itself.
        """
        if self._loop is None:
            self._leader = leader
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._run, name="engine", daemon=True).start()
        await self._changed.wait()
        if self._info and self._publishing is None:
            self._publishing = asyncio.create_task(self._publish_metrics())
        outcome = self._info or self._failure
        assert outcome is not None
        return outcome

    async def ended(self) -> EngineFailure | None:
        """Wait until a ready engine has ended. Returns the reason, or None after `stop`."""
        await self._ended.wait()
        return self._failure

    async def progress(self) -> str:
        """The stage of the engine's start, in a few words."""
        if self._failure:
            return "failed"
        return "ready" if self._info else logs.stage(logs.tail(self._log, 10_000))

    async def health(self) -> bool:
        """Whether the engine serves."""
        return self._info is not None and not self._ended.is_set()

    async def load(self) -> EngineLoad:
        """The engine's current load; zero before it serves."""
        return load.current()

    async def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log of the engine and all its processes."""
        return logs.tail(self._log, lines)

    async def log(self, after: int | None, lines: int) -> tuple[str, int]:
        """What the log has after so many bytes, and the bytes to give next time. None: the last
        lines."""
        if after is not None:
            return logs.since(self._log, after)
        there = logs.size(self._log)
        return logs.tail(self._log, lines), there

    async def stop(self, grace_s: float) -> None:
        """Let requests in flight run for `grace_s`, then stop. Does not wait for a start."""
        self._grace_s = grace_s
        if self._engine_loop is None or self._stop is None or self._info is None:
            return
        self._engine_loop.call_soon_threadsafe(self._stop.set)
        await self._ended.wait()

    async def _publish_metrics(self) -> None:
        tags = {
            "deployment": self._spec.deployment.name,
            "engine": self._spec.name,
            "role": self._spec.role,
        }
        await RayMetrics(tags).publish(_metrics, self._ended)

    def _run(self) -> None:
        """The engine's thread."""
        # Garbage collection takes a fifth of vLLM's import time, and imported modules stay anyway.
        gc.disable()
        try:
            uvloop.run(self._serve())
        # vLLM raises SystemExit for some bad arguments. No exception may leave the thread.
        except BaseException as error:  # noqa: BLE001
            self._failure = self._explain(error)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._changed.set)
        self._loop.call_soon_threadsafe(self._ended.set)

    async def _serve(self) -> None:
        self._engine_loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        _check_model(self._spec.deployment.model.path)
        with bind(self._address) as sock:
            engine_id = f"{self._spec.run_id}-{self._spec.name}-{os.getpid()}"
            meeting = await self._meeting_place()
            args = engine_args(
                self._spec,
                host=self._address,
                engine_id=engine_id,
                meeting=meeting,
                scratch=self._scratch,
            )
            url = url_of(sock)
            await run_engine(
                args,
                sock,
                lambda model, events: self._ready(url, model, events),
                self._stop,
                lambda: self._grace_s,
                self._spec.deployment.engine.hang_timeout_s,
            )

    async def _meeting_place(self) -> tuple[str, int]:
        if self._spec.ranks == 1:
            return "", 0
        if self._spec.rank == 0:
            return await self.meeting()
        where: tuple[str, int] = await asyncio.to_thread(
            ray.get,
            self._leader.meeting.remote(),
            timeout=self._spec.deployment.engine.startup_timeout_s,
        )
        return where

    def _ready(
        self, url: str, model: dict[str, str | int], events: KvEventAddresses | None
    ) -> None:
        gc.enable()
        if self._meeting is not None:
            self._meeting.close()
        self._info = EngineInfo(
            name=self._spec.name,
            role=self._spec.role,
            url=url,
            pid=os.getpid(),
            node_id=self._node_id,
            model=model,
            startup_s=time.monotonic() - self._began,
            kv_events=events.endpoint if events else None,
            kv_events_replay=events.replay if events else None,
        )
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._changed.set)

    def _explain(self, error: BaseException) -> EngineFailure:
        sys.stdout.flush()
        log = logs.tail(self._log, 10_000)
        own = logs.describe(error)
        cause = (
            own
            if not logs.is_relayed(own)
            else (logs.root_cause(log, served=self._info is not None) or own)
        )
        return EngineFailure(cause, logs.tail(self._log, TAIL_LINES))


class PrefillEngine(EngineActor):
    """Its name is what Ray's dashboard shows for a prefill engine."""


class DecodeEngine(EngineActor):
    """Its name is what Ray's dashboard shows for a decode engine."""


async def _metrics() -> Iterable[Metric]:
    return metrics()


def _own_log() -> Path:
    """Redirect stderr to stdout. So one file, which Ray's dashboard shows, has all lines in order.

    Returns that file.
    """
    sys.stderr.flush()
    os.dup2(1, 2)
    return Path(os.readlink("/proc/self/fd/1"))


def _check_model(path: str) -> None:
    """Raise at once if the checkpoint is a folder that is missing.

    Without this check, vLLM asks the model hub, and its error does not name the folder.
    """
    if path.startswith(("/", "./", "../")) and not Path(path).is_dir():
        raise FileNotFoundError(f"model.path: there is no folder {path} on {platform.node()}")


def _node_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
