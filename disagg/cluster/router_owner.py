"""Owns the router of all deployments: starts it, sends it their engines, restarts it when it dies.

There is one owner, in the process of `disagg serve`. Supervisors know their own engines only, so
they send them here. A router that restarts gets the engines of all deployments again; the engines
do not notice. This module must never decide anything about engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from disagg.cluster.engines import NotNow
from disagg.cluster.router_handle import RouterHandle
from disagg.engine.spec import EngineInfo
from disagg.errors import ConfigError, StartupError
from disagg.router.topology import Away, EngineEndpoint, name_in

_RESTARTS = 5
_STEADY_S = 300.0  # a router that served this long did not die because of its start
_PAUSE_S = 1.0


@dataclass(frozen=True)
class _Group:
    """The engines of one deployment, as they were at `at`, in monotonic seconds."""

    engines: Sequence[EngineInfo]
    down: Mapping[str, Away]
    at: float


class RouterOwner:
    """The router of one deployment or several. `group`: see `Deployment.group`.

    `tell(line, log_tail)` is called for each event; `log_tail` is empty.
    """

    def __init__(self, router: RouterHandle, tell: Callable[[str, str], None]) -> None:
        self._router, self._tell = router, tell
        self._groups: dict[str, _Group] = {}
        self._deaths, self._up_at = 0, 0.0

    @property
    def ended(self) -> Any:
        """Ray's reference for which `step` looks."""
        return self._router.ended

    def start(self, engines: Mapping[str, Sequence[EngineInfo]]) -> None:
        """Serve with these engines, by group. Raises StartupError."""
        now = time.monotonic()
        self._groups = {group: _Group(infos, {}, now) for group, infos in engines.items()}
        self._router.start(self._engines(), self._down(now))
        self._up_at = time.monotonic()

    def replace(self, group: str, engines: Sequence[EngineInfo], down: Mapping[str, Away]) -> None:
        """Replace the engines of one deployment. `down`: those that do not serve, by name.

        Waits up to `router_handle.REPLACE_S`.
        """
        now = time.monotonic()
        self._groups[group] = _Group(tuple(engines), dict(down), now)
        self._router.replace(self._engines(), self._down(now))

    def step(self) -> str | None:
        """Restart the router if it died. Returns why nothing can go on, or None."""
        return self._restart() if self._router.has_ended() else None

    def _restart(self) -> str | None:
        why, now = self._router.why_ended(), time.monotonic()
        self._deaths = 1 if now - self._up_at > _STEADY_S else self._deaths + 1
        if self._deaths > _RESTARTS:
            return f"the router died {self._deaths} times in a row: {why}"
        self._tell(f"the router died: {why}; starting it again", "")
        self._router.kill()
        for last in (False, True):
            try:
                self._router.launch()
                self._router.start(self._engines(), self._down(time.monotonic()))
                break
            except (ConfigError, StartupError, NotNow, RayError) as error:
                self._router.kill()
                if last:
                    return f"the router died and did not start again: {error}"
                time.sleep(_PAUSE_S)  # the port or the actor's name may not be free yet
        self._up_at = time.monotonic()
        self._tell(f"the router is back after {self._up_at - now:.1f} s", "")
        return None

    def _engines(self) -> list[EngineEndpoint]:
        return [
            EngineEndpoint(
                name=name_in(name, info.name),
                role=info.role,
                url=info.url,
                kv_events=info.kv_events,
                kv_events_replay=info.kv_events_replay,
            )
            for name, group in self._groups.items()
            for info in group.engines
        ]

    def _down(self, now: float) -> dict[str, Away]:
        """The missing engines of all deployments, with the seconds that are left until now."""
        return {
            name_in(name, engine): _later(away, now - group.at)
            for name, group in self._groups.items()
            for engine, away in group.down.items()
        }


def _later(away: Away, passed_s: float) -> Away:
    if away.back_s is None:
        return away
    return away._replace(back_s=max(0.0, away.back_s - passed_s))
