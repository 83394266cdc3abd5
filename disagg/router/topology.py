"""The engines that the router knows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from disagg.config import Role


@dataclass(frozen=True)
class EngineEndpoint:
    """One engine: its name (`prefill-0`), its role, and the URL of its OpenAI server."""

    name: str
    role: Role
    url: str


class Away(NamedTuple):
    """A missing engine. `why`: for people to read. `returns`: whether it will serve again.
    `back_s`: about how many seconds until then, if that is known."""

    why: str
    returns: bool = True
    back_s: float | None = None


def role_of(name: str) -> str:
    """The role of the engine with this name: names begin with the role."""
    return name.partition("-")[0]


class Topology:
    """The current engines, in the order given to the last `replace`."""

    def __init__(
        self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away] | None = None
    ) -> None:
        self.replace(engines, down or {})

    def of(self, role: Role) -> Sequence[EngineEndpoint]:
        """The engines of one role."""
        return self._by_role[role]

    def knows(self, role: Role) -> bool:
        """Whether the deployment has engines of this role, up or down."""
        return bool(self.of(role)) or any(role_of(name) == role for name in self.down)

    def returning(self, role: Role) -> Mapping[str, Away]:
        """The missing engines of this role that will serve again, with the seconds left."""
        passed = time.monotonic() - self._told_at
        return {
            name: away if away.back_s is None else away._replace(back_s=away.back_s - passed)
            for name, away in self.down.items()
            if away.returns and role_of(name) == role
        }

    def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Use these engines from now on. `down`: those that are missing, by name."""
        self.engines, self.down = tuple(engines), down
        self._told_at = time.monotonic()
        self._by_role: dict[Role, Sequence[EngineEndpoint]] = {
            role: tuple(engine for engine in engines if engine.role == role)
            for role in get_args(Role)
        }
