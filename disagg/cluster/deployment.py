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

from disagg import credentials
from disagg.cluster import pools, ray_session
from disagg.cluster.driver import Driver
from disagg.cluster.router_handle import RouterHandle, RouterSpec, bad_port
from disagg.cluster.run_folder import PortLock, RunFolder, sweep, user_folder
from disagg.cluster.signals import StopSignals, kept
from disagg.cluster.supervisor.loop import Inheritance
from disagg.config import Deployment, RouterSection
from disagg.engine.spec import EngineInfo
from disagg.errors import StartupError
from disagg.router.server.server import url_of


class RunningDeployment:
    """A deployment whose endpoint answers. `stop` it, or use it as a context manager."""

    def __init__(self, url: str, dashboard_url: str | None, owner: Driver) -> None:
        self.url = url
        self.dashboard_url = dashboard_url
        self._owner = owner
        self._undo = ExitStack()

    @property
    def engines(self) -> Sequence[EngineInfo]:
        """The engines that serve: names, roles, URLs, what the model resolved to."""
        return self._owner.engines

    @property
    def supervisor_pid(self) -> int | None:
        """The process that heals and scales; None between its death and the next one."""
        return self._owner.supervisor_pid

    def look_after(self, timeout_s: float) -> str | None:
        """Watch for up to `timeout_s`; see `Driver.step`. To be called again and again."""
        return self._owner.step(timeout_s)

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
    tell: Callable[[str, str], None] | None = None,
) -> RunningDeployment:
    """Start a deployment; returns when its endpoint answers.

    `progress` is told, about twice a second, what is going on; `tell`, later, what died and came
    back (see `Driver`). Raises ConfigError or StartupError; whatever it raises (`signals` may
    interrupt it), nothing stays behind.
    """
    with ExitStack() as undo:
        try:
            running = _start(deployment, progress, signals, tell or _silent, undo)
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
    tell: Callable[[str, str], None],
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
    session = ray_session.connect(run_id, signals.install if signals else kept())
    undo.callback(session.stop)
    if session.private and (problems := pools.shortfalls(deployment)):
        raise StartupError(problems[0])
    wanted_router = RouterSpec(
        deployment.name,
        deployment.router,
        session.node_id,
        api_keys,
        engine_key,
        deployment.transfer.strict,
    )
    router = RouterHandle(wanted_router)
    undo.callback(router.kill)
    router.launch()
    # Only a Ray of ours has one node for certain: others get more, also while we start.
    run = pools.Run(run_id, str(storage.path), session.private, secret, engine_key)
    engines = pools.launch(run.specs(deployment))
    owner = Driver(deployment.name, session.node_id, router, tell)
    owner.hold(engines)
    undo.callback(owner.stop_engines)
    ready = pools.wait_ready(engines, deployment.engine.startup_timeout_s, progress)
    progress("starting the router")
    router.start(ready, {})
    undo.callback(router.stop, deployment.router.limits.drain_s)
    undo.callback(owner.close)
    owner.begin(
        Inheritance(
            run,
            wanted=deployment,
            before=None,
            engines=[engine.held for engine in engines],
            router=router.spec,
            router_actor=router.actor,
            private=session.private,
        )
    )
    url = url_of(deployment.router, router.spec.section.port)
    return RunningDeployment(url, session.dashboard_url, owner)


def _silent(_: str, __: str) -> None:
    """Nobody wants to know."""


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
            raise bad_port(f"{section.host}:{section.port}: {error.strerror}") from error
    return lock


def _handoff_folder(deployment: Deployment, run_id: str) -> RunFolder:
    parent: Path = deployment.transfer.storage.path or user_folder()
    sweep(parent)
    return RunFolder(parent, run_id)
