"""Starts and stops a whole deployment, or several behind one router.

The order matters. Fast checks (secrets, the port, the machine's resources) come before the minute
of loading. A stop undoes the steps in reverse order, also when the start fails or is interrupted.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import ray
from ray.exceptions import RayError

from disagg import credentials
from disagg.cluster import pools, ray_session
from disagg.cluster.driver import Driver, stop
from disagg.cluster.router_handle import RouterHandle, RouterSpec, bad_port
from disagg.cluster.router_owner import RouterOwner
from disagg.cluster.run_folder import PortLock, RunFolder, sweep
from disagg.cluster.signals import StopSignals, handler_restorer
from disagg.cluster.supervisor.loop import DeploymentState
from disagg.config import Deployment, RouterSection
from disagg.engine.spec import EngineInfo
from disagg.errors import StartupError
from disagg.local.running import Announced
from disagg.private_files import user_folder
from disagg.router.server.server import url_of

_PREFIX = "disagg-run-"
_FALLBACK_S = 0.1  # a fallback's events are not Ray's


class RunningDeployment:
    """A deployment whose endpoint answers, or several that share it. `stop` it, or use it as a
    context manager."""

    def __init__(
        self,
        url: str,
        dashboard_url: str | None,
        drivers: Sequence[Driver],
        router: RouterOwner,
        tell: Callable[[str, str], None],
    ) -> None:
        self.url = url
        self.dashboard_url = dashboard_url
        self._drivers, self._router, self._tell = list(drivers), router, tell
        self._undo = ExitStack()

    @property
    def engines(self) -> Sequence[EngineInfo]:
        """The engines that serve: names, roles, URLs, resolved models."""
        return [info for driver in self._drivers for info in driver.engines]

    @property
    def by_deployment(self) -> Mapping[str, Sequence[EngineInfo]]:
        """The engines that serve, by the deployment's name."""
        return {driver.name: driver.engines for driver in self._drivers}

    @property
    def supervisor_pid(self) -> int | None:
        """The process id of the (first) supervisor; None between its death and its restart."""
        return self._drivers[0].supervisor_pid

    def look_after(self, timeout_s: float) -> str | None:
        """Do the work of the drivers and of the router's owner for up to `timeout_s`. Call it in a
        loop.

        Returns why nothing can go on, or None. A deployment that cannot go on beside others that
        can is given up.
        """
        try:
            self._wait(timeout_s)
            problem = self._router.step()
        except RayError:  # Ray is busy with a death; the drivers count for how long
            problem = None
        for driver in list(self._drivers):
            if problem is not None:
                break
            problem = driver.step(0)
            if problem is not None and len(self._drivers) > 1:
                self._give_up(driver, problem)
                problem = None
        return problem

    def _wait(self, timeout_s: float) -> None:
        """Wait until a driver or the router's owner has work."""
        reports = [driver.awaited for driver in self._drivers]
        refs = [self._router.ended, *(report for report in reports if report is not None)]
        ray.wait(refs, timeout=min(timeout_s, _FALLBACK_S) if None in reports else timeout_s)

    def _give_up(self, driver: Driver, problem: str) -> None:
        self._tell(f"{driver.name} is given up, the others go on: {problem}", "")
        self._drivers.remove(driver)
        driver.give_up()

    def stop(self) -> None:
        """Stop everything that `start` started. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> RunningDeployment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start(
    *deployments: Deployment,
    progress: Callable[[str], None],
    signals: StopSignals | None = None,
    tell: Callable[[str, str], None] | None = None,
) -> RunningDeployment:
    """Start a deployment, or several of one file. Returns when its endpoint answers.

    `progress` is called about twice a second with the state of the start. `tell` is called later
    with each event, such as an engine that died or restarted (see `Driver`). `signals` may
    interrupt the start. Raises ConfigError or StartupError, and leaves nothing running then.
    """
    with ExitStack() as undo:
        try:
            running = _start(deployments, progress, signals, tell or _silent, undo)
        except BaseException:
            if signals:
                signals.disarm()  # a signal must not interrupt the clean-up
            raise
        running._undo = undo.pop_all()
    return running


def _start(
    deployments: Sequence[Deployment],
    progress: Callable[[str], None],
    signals: StopSignals | None,
    tell: Callable[[str, str], None],
    undo: ExitStack,
) -> RunningDeployment:
    """Start. After each step, `undo` holds the callbacks that undo all steps so far."""
    first = deployments[0]  # router and Ray are those of all
    known = [credentials.secret(deployment) for deployment in deployments]
    keys = credentials.router_keys(first.router)
    credentials.tls(first.router)
    credentials.engine_tls(first.router)
    section, engine_key = _with_admin_socket(first.router), secrets.token_hex(32)
    number = os.urandom(4).hex()
    if section.port:
        undo.callback(_reserve(section).release)
    announced = [
        Announced(one.name, f"{one.name}-{number}", one.model.served_name or one.model.path)
        for one in deployments
    ]
    for file in announced:
        undo.callback(file.remove)
    storages = []
    for deployment in deployments:
        storages.append(_handoff_folder(deployment, f"{deployment.name}-{number}"))
        undo.callback(storages[-1].remove)
    progress("starting Ray")
    # Each deployment's actors have a namespace of their own; this is the router's.
    namespace = f"{first.group and 'router-'}{first.name}-{number}"
    session = ray_session.connect(
        namespace,
        signals.install if signals else handler_restorer(),
        without_token=first.ray.without_token,
    )
    undo.callback(session.stop)
    if session.private and (problems := pools.shortfalls(deployments, pools.resources())):
        raise StartupError(problems[0])
    router = RouterHandle(
        _router_spec(first, section, namespace, session.node_id, keys, engine_key)
    )
    undo.callback(router.kill)
    router.launch()
    # Only a private Ray certainly has one node. A joined cluster may get more nodes at any time.
    runs = [
        pools.Run(f"{one.name}-{number}", path, session.private, secret, engine_key)
        for one, path, secret in zip(deployments, map(_handoffs, storages), known, strict=True)
    ]
    owner = RouterOwner(router, tell)
    drivers = _launch(deployments, runs, session.node_id, owner, tell, undo)
    ready = iter(pools.wait_ready([one for driver in drivers for one in driver.owned], progress))
    progress("starting the router")
    owner.start(
        {
            one.group: [next(ready) for _ in driver.owned]
            for one, driver in zip(deployments, drivers, strict=True)
        }
    )
    undo.callback(router.stop, section.limits.drain_s)
    for driver in drivers:
        undo.callback(driver.close)
    for deployment, run, driver in zip(deployments, runs, drivers, strict=True):
        records = [engine.record for engine in driver.owned]
        private = session.private and not deployment.group
        driver.begin(DeploymentState(run, deployment, None, records, private))
    url = url_of(section, router.spec.section.port)
    at = str(section.admin_socket).replace("{port}", str(router.spec.section.port))
    for file in announced:
        file.serves(url, at)
    return RunningDeployment(url, session.dashboard_url, drivers, owner, tell)


def _router_spec(
    first: Deployment,
    section: RouterSection,
    namespace: str,
    node_id: str,
    keys: Sequence[credentials.ApiKey],
    engine_key: str,
) -> RouterSpec:
    """With several deployments, the section's models say what differs between them."""
    name, strict = ("", False) if first.group else (first.name, first.transfer.strict)
    return RouterSpec(name, section, namespace, node_id, keys, engine_key, strict)


def _launch(
    deployments: Sequence[Deployment],
    runs: Sequence[pools.Run],
    node_id: str,
    owner: RouterOwner,
    tell: Callable[[str, str], None],
    undo: ExitStack,
) -> list[Driver]:
    """A driver for each deployment. Begins the starts of all engines together."""
    specs = [run.specs(one) for run, one in zip(runs, deployments, strict=True)]
    engines = pools.launch([spec for each in specs for spec in each])
    drivers = [
        Driver(
            one.name,
            run.run_id,
            node_id,
            partial(owner.replace, one.group),
            _labelled(tell, one.group),
        )
        for one, run in zip(deployments, runs, strict=True)
    ]
    for driver, run in zip(drivers, runs, strict=True):
        driver.own([engine for engine in engines if engine.spec.run_id == run.run_id])
    undo.callback(stop, drivers)
    return drivers


def _handoffs(folder: RunFolder) -> str:
    return str(folder.path / "handoffs")


def _labelled(tell: Callable[[str, str], None], group: str) -> Callable[[str, str], None]:
    """Names the deployment in each line, if there are several."""
    return lambda what, tail: tell(f"{group}: {what}" if group else what, tail)


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
    return RunFolder(parent, _PREFIX, run_id).guarded()
