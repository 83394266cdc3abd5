"""Brings a whole deployment up and takes it down again.

The order is the point: what can be checked at once (secrets, the port, the machine's
resources) comes before the minute of loading; everything started is undone in reverse, also
when a start fails or is interrupted half-way.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg import credentials
from disagg.cluster import pools, ray_session
from disagg.cluster.folders import PortLock, RunFolder, sweep, user_folder
from disagg.cluster.router_actor import RouterActor
from disagg.cluster.signals import StopSignals
from disagg.config import Deployment, RouterSection
from disagg.engine.spec import EngineInfo
from disagg.errors import ConfigError, StartupError
from disagg.router.server import url_of

GRACE_S = 3.0
STOP_S = 4.0
ROUTER_START_S = 60.0


class RunningDeployment:
    """A deployment whose endpoint answers. `stop` it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        dashboard_url: str | None,
        engines: Sequence[pools.Engine],
        router_ended: Any,
    ) -> None:
        self.url = url
        self.dashboard_url = dashboard_url
        self._engines = engines
        self._router_ended = router_ended
        self._undo = ExitStack()

    @property
    def engines(self) -> list[EngineInfo]:
        """The ready engines: names, roles, URLs, what the model resolved to."""
        return [engine.info for engine in self._engines if engine.info is not None]

    def first_ended(self, timeout_s: float) -> str | None:
        """Wait up to `timeout_s` for an engine or the router to end; says who and why."""
        return pools.first_ended(self._engines, [self._router_ended], timeout_s)

    def stop(self) -> None:
        """Stop everything that `start` started. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> RunningDeployment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start(
    deployment: Deployment,
    *,
    progress: Callable[[str], None],
    signals: StopSignals | None = None,
) -> RunningDeployment:
    """Start a deployment; returns when its endpoint answers.

    `progress` is told, about twice a second, what is going on. Raises ConfigError or
    StartupError; whatever it raises (`signals` may interrupt it), nothing stays behind.
    """
    with ExitStack() as undo:
        try:
            running = _start(deployment, progress, signals, undo)
        except BaseException:
            if signals:
                signals.disarm()  # nothing may interrupt the undoing
            raise
        running._undo = undo.pop_all()
    return running


def _start(
    deployment: Deployment,
    progress: Callable[[str], None],
    signals: StopSignals | None,
    undo: ExitStack,
) -> RunningDeployment:
    """Start, leaving on `undo` how to undo what was done so far."""
    secret = credentials.secret(deployment)
    api_keys = credentials.api_keys(deployment.router)
    credentials.tls(deployment.router)
    engine_key = secrets.token_hex(32)
    run_id = f"{deployment.name}-{os.urandom(4).hex()}"
    if deployment.router.port:
        undo.callback(_reserve(deployment.router).release)
    storage = _handoff_folder(deployment, run_id)
    undo.callback(storage.remove)
    progress("starting Ray")
    session = ray_session.connect(run_id, signals.install if signals else _nothing)
    undo.callback(session.stop)
    if session.private:
        pools.check_resources(deployment)
    router, port = _launch_router(deployment.router, session.node_id, undo)
    engines = pools.launch(
        pools.specs(
            deployment,
            run_id=run_id,
            storage_path=str(storage.path),
            loopback=session.single_node,
            secret=secret,
            engine_key=engine_key,
        )
    )
    undo.callback(pools.stop, engines, GRACE_S, STOP_S)
    pools.wait_ready(engines, deployment.engine.startup_timeout_s, progress)
    progress("starting the router")
    infos = [engine.info for engine in engines]
    _await_router(router.start.remote(infos, api_keys, engine_key, deployment.transfer.strict))
    undo.callback(_stop_router, router, deployment.router.limits.drain_s)
    return RunningDeployment(
        url_of(deployment.router, port),
        session.dashboard_url,
        engines,
        router.ended.remote(),
    )


def _nothing() -> None:
    """No signal handlers to put back."""


def _reserve(section: RouterSection) -> PortLock:
    """Fail now, not in a minute, when the port can't be had."""
    lock = PortLock(section.port)
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((section.host, section.port))
        except OSError as error:
            lock.release()
            raise _bad_port(f"{section.host}:{section.port}: {error.strerror}") from error
    return lock


def _bad_port(problem: str) -> ConfigError:
    return ConfigError(
        f"router.port: {problem}; stop what listens there or choose another port (0: any free one)"
    )


def _handoff_folder(deployment: Deployment, run_id: str) -> RunFolder:
    parent: Path = deployment.transfer.storage.path or user_folder()
    sweep(parent)
    return RunFolder(parent, run_id)


def _launch_router(section: RouterSection, node_id: str, undo: ExitStack) -> tuple[Any, int]:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    router: Any = (
        ray.remote(RouterActor)
        .options(name="router", num_cpus=0, scheduling_strategy=here)
        .remote(section)
    )
    undo.callback(ray.kill, router)
    bound = _await_router(router.bind.remote())
    if isinstance(bound, str):
        raise _bad_port(bound)
    return router, bound


def _await_router(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=ROUTER_START_S)
    except RayError as error:
        # Ray wraps what the actor raised into a remote trace, which is for the log alone.
        cause = getattr(error, "cause", None) or error
        what = f"{type(cause).__name__}: {cause}"
        raise StartupError(f"the router did not start: {what}", str(error)) from error


def _stop_router(router: Any, grace_s: float) -> None:
    ray.wait([router.stop.remote(grace_s)], timeout=grace_s + STOP_S)
