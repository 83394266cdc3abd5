"""The router's actor as the driver sees it: launched, told of engines, launched again, stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from disagg.cluster.router_actor import RouterActor
from disagg.config import RouterSection
from disagg.credentials import ApiKey
from disagg.engine.spec import EngineInfo
from disagg.errors import ConfigError, StartupError

START_S = 60.0
TELL_S = 5.0
STOP_S = 4.0


class Router:
    """A deployment's router: one at a time, always on the same port of the same node."""

    def __init__(
        self,
        deployment: str,
        section: RouterSection,
        node_id: str,
        api_keys: Sequence[ApiKey],
        engine_key: str,
        *,
        strict: bool,
    ) -> None:
        self._deployment, self._section, self._node_id = deployment, section, node_id
        self._given = (api_keys, engine_key, strict)
        self._actor: Any = None
        self._serves = False
        self.ended: Any = None
        """Ray's promise of its end."""

    @property
    def port(self) -> int:
        """Where it listens, from `launch` on."""
        return self._section.port

    def launch(self) -> None:
        """Start the process and take the port. Raises ConfigError or StartupError."""
        here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
        self._actor = (
            ray.remote(RouterActor)
            .options(name="router", num_cpus=0, scheduling_strategy=here)
            .remote(self._deployment, self._section)
        )
        bound = _outcome(self._actor.bind.remote())
        if isinstance(bound, str):
            raise bad_port(bound)
        self._section = self._section.model_copy(update={"port": bound})

    def start(self, engines: Sequence[EngineInfo], down: Mapping[str, str]) -> None:
        """Serve with these. Raises StartupError."""
        _outcome(self._actor.start.remote(list(engines), dict(down), *self._given))
        self.ended = self._actor.ended.remote()
        self._serves = True

    def replace(self, engines: Sequence[EngineInfo], down: Mapping[str, str]) -> None:
        """Tell it of other engines. One that cannot hear it is about to end, or hears it when
        it starts again."""
        if self._serves:
            ray.wait([self._actor.replace.remote(list(engines), dict(down))], timeout=TELL_S)

    def why_ended(self) -> str:
        """After `ended`."""
        try:
            ray.get(self.ended, timeout=0)
        except RayError as error:
            return _cause(error)
        return "it stopped"

    def kill(self) -> None:
        """End the process, if there is one."""
        self._serves = False
        if self._actor is not None:
            ray.kill(self._actor)

    def stop(self, grace_s: float) -> None:
        """Accept nothing new, let running requests go on for `grace_s`."""
        if self._serves:
            ray.wait([self._actor.stop.remote(grace_s)], timeout=grace_s + STOP_S)


def bad_port(problem: str) -> ConfigError:
    """The port cannot be had."""
    return ConfigError(
        f"router.port: {problem}; stop what listens there or choose another port (0: any free one)"
    )


def _outcome(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=START_S)
    except RayError as error:
        raise StartupError(f"the router did not start: {_cause(error)}", str(error)) from error


def _cause(error: RayError) -> str:
    # Ray wraps what the actor raised into a remote trace, which is for the log alone.
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0].rstrip('.')}"
