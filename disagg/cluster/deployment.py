"""Starts and stops a whole deployment.

The order matters. Fast checks (secrets, the port, the machine's resources) come before the minute
of loading. A stop undoes the steps in reverse order, also when the start fails or is interrupted.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from disagg import credentials
from disagg.cluster import pools, ray_session
from disagg.cluster.driver import Driver
from disagg.cluster.router_handle import RouterHandle, RouterSpec, bad_port
from disagg.cluster.run_folder import PortLock, RunFolder, sweep
from disagg.cluster.signals import StopSignals, handler_restorer
from disagg.cluster.supervisor.loop import DeploymentState
from disagg.config import Deployment, RouterSection
from disagg.engine.spec import EngineInfo
from disagg.errors import StartupError
from disagg.private_files import user_folder
from disagg.router.server.server import url_of

_PREFIX = "disagg-run-"


class RunningDeployment:
    """A deployment whose endpoint answers. `stop` it, or use it as a context manager."""

    def __init__(self, url: str, dashboard_url: str | None, driver: Driver) -> None:
        self.url = url
        self.dashboard_url = dashboard_url
        self._driver = driver
        self._undo = ExitStack()

    @property
    def engines(self) -> Sequence[EngineInfo]:
        """The engines that serve: names, roles, URLs, resolved models."""
        return self._driver.engines

    @property
    def supervisor_pid(self) -> int | None:
        """The supervisor's process id; None between its death and its restart."""
        return self._driver.supervisor_pid

    def look_after(self, timeout_s: float) -> str | None:
        """Do the driver's work for up to `timeout_s`; see `Driver.step`. Call it in a loop."""
        return self._driver.step(timeout_s)

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
    """Start a deployment. Returns when its endpoint answers.

    `progress` is called about twice a second with the state of the start. `tell` is called later
    with each event, such as an engine that died or restarted (see `Driver`). `signals` may
    interrupt the start. Raises ConfigError or StartupError, and leaves nothing running then.
    """
    with ExitStack() as undo:
        try:
            running = _start(deployment, progress, signals, tell or _silent, undo)
        except BaseException:
            if signals:
                signals.disarm()  # a signal must not interrupt the clean-up
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
    """Start. After each step, `undo` holds the callbacks that undo all steps so far."""
    secret = credentials.secret(deployment)
    keys = credentials.router_keys(deployment.router)
    credentials.tls(deployment.router)
    credentials.engine_tls(deployment.router)
    section = _with_admin_socket(deployment.router)
    engine_key = secrets.token_hex(32)
    run_id = f"{deployment.name}-{os.urandom(4).hex()}"
    if deployment.router.port:
        undo.callback(_reserve(deployment.router).release)
    storage = _handoff_folder(deployment, run_id)
    undo.callback(storage.remove)
    progress("starting Ray")
    session = ray_session.connect(
        run_id,
        signals.install if signals else handler_restorer(),
        without_token=deployment.ray.without_token,
    )
    undo.callback(session.stop)
    if session.private and (problems := pools.shortfalls(deployment)):
        raise StartupError(problems[0])
    wanted_router = RouterSpec(
        deployment.name,
        section,
        session.node_id,
        keys,
        engine_key,
        deployment.transfer.strict,
    )
    router = RouterHandle(wanted_router)
    undo.callback(router.kill)
    router.launch()
    # Only a private Ray certainly has one node. A joined cluster may get more nodes at any time.
    run = pools.Run(run_id, str(storage.path / "handoffs"), session.private, secret, engine_key)
    engines = pools.launch(run.specs(deployment))
    driver = Driver(deployment.name, session.node_id, router, tell)
    driver.own(engines)
    undo.callback(driver.stop_engines)
    ready = pools.wait_ready(engines, deployment.engine.startup_timeout_s, progress)
    progress("starting the router")
    router.start(ready, {})
    undo.callback(router.stop, deployment.router.limits.drain_s)
    undo.callback(driver.close)
    driver.begin(
        DeploymentState(
            run,
            wanted=deployment,
            before=None,
            engines=[engine.record for engine in engines],
            router=router.spec,
            router_actor=router.actor,
            private=session.private,
        )
    )
    url = url_of(deployment.router, router.spec.section.port)
    return RunningDeployment(url, session.dashboard_url, driver)


def _silent(_: str, __: str) -> None:
    """The default of `tell`."""


def _with_admin_socket(section: RouterSection) -> RouterSection:
    # Chosen here: the router's actor has the temporary folder of a private Ray.
    default = user_folder().path / "router-{port}.sock"
    return section.model_copy(update={"admin_socket": section.admin_socket or default})


def _reserve(section: RouterSection) -> PortLock:
    """Raise at once, not after a minute of loading, if the port is not free."""
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
    own = user_folder().make("TMPDIR")
    parent = deployment.transfer.storage.path or own.path
    sweep(parent, _PREFIX)
    return RunFolder(parent, _PREFIX, run_id)
