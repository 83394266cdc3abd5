"""The handle of the router's actor: launch, replace engines, stop. `RouterOwner` decides when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg.cluster.engines import NotNow
from disagg.cluster.router_actor import RouterActor
from disagg.config import RouterSection
from disagg.credentials import ApiKey
from disagg.errors import ConfigError, StartupError
from disagg.router.server.admin_socket import remove_left
from disagg.router.topology import Away, EngineEndpoint

START_S = 60.0
REPLACE_S = 5.0
STOP_S = 4.0


@dataclass(frozen=True)
class RouterSpec:
    """A router to start. Once it was bound, the section's port is the port that it got.

    deployment: for its metrics; empty if it has several. namespace: Ray's, of its actor.
    """

    deployment: str
    section: RouterSection
    namespace: str
    node_id: str
    api_keys: Sequence[ApiKey]
    engine_key: str
    strict: bool


Create = Callable[[RouterSpec], Any]
"""Creates a router's actor. Raises NotNow."""


def create(spec: RouterSpec) -> Any:
    """Create the actor. Ray ends it when this process ends."""
    here = NodeAffinitySchedulingStrategy(spec.node_id, soft=False)
    options = {
        "name": "router",
        "namespace": spec.namespace,
        "num_cpus": 0,
        "scheduling_strategy": here,
    }
    try:
        return ray.remote(RouterActor).options(**options).remote(spec.deployment, spec.section)
    except ValueError as error:  # Ray has not yet released the name of the previous actor
        raise NotNow(str(error)) from error


class RouterHandle:
    """There is one router at a time, always on the same node and port."""

    def __init__(self, spec: RouterSpec, create: Create = create) -> None:
        self.spec = spec
        self.actor: Any = None
        self.ended: Any = None
        """Ray's reference to the call of `ended`; ready when the actor has ended."""
        self._create = create
        self._serves = False

    def launch(self) -> None:
        """Start the process and bind the port. Raises ConfigError, StartupError or NotNow."""
        self.actor = self._create(self.spec)
        bound = _outcome(self.actor.bind.remote())
        if isinstance(bound, str):
            raise bad_port(bound)
        section = self.spec.section.model_copy(update={"port": bound})
        self.spec = replace(self.spec, section=section)

    def start(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Serve with these engines. Raises StartupError."""
        given = (self.spec.api_keys, self.spec.engine_key, self.spec.strict)
        _outcome(self.actor.start.remote(list(engines), dict(down), *given))
        self.ended = self.actor.ended.remote()
        self._serves = True

    def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Replace the router's engines. Waits up to `REPLACE_S`.

        A router that does not take the call is ending. It gets the engines when it restarts.
        """
        if self._serves:
            ray.wait([self.actor.replace.remote(list(engines), dict(down))], timeout=REPLACE_S)

    def has_ended(self) -> bool:
        """Whether a router that served has ended. Never waits."""
        return self._serves and bool(ray.wait([self.ended], timeout=0)[0])

    def why_ended(self) -> str:
        """Why the router ended. Call it when it has ended."""
        try:
            ray.get(self.ended, timeout=0)
        except RayError as error:
            return _cause(error)
        return "it stopped"

    def kill(self) -> None:
        """Kill the process, if there is one."""
        self._serves = False
        if self.actor is not None:
            ray.kill(self.actor)
            section = self.spec.section
            if section.admin_socket is not None and section.port:
                remove_left(section.admin_socket, section.port)

    def stop(self, grace_s: float) -> None:
        """Accept no new requests, let running requests go on for `grace_s`."""
        if self._serves:
            ray.wait([self.actor.stop.remote(grace_s)], timeout=grace_s + STOP_S)


def bad_port(problem: str) -> ConfigError:
    """The error for a port that cannot be bound."""
    return ConfigError(
        f"router.port: {problem}; stop what listens there or choose another port (0: any free one)"
    )


def _outcome(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=START_S)
    except RayError as error:
        raise StartupError(f"the router did not start: {_cause(error)}", str(error)) from error


def _cause(error: RayError) -> str:
    # Ray wraps the actor's exception into a remote traceback, which belongs in the log only.
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0].rstrip('.')}"
