"""The engines that the router knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from disagg.config import Role


@dataclass(frozen=True)
class EngineEndpoint:
    """One engine: its name (`prefill-0`), its role, and the URL of its OpenAI server."""

    name: str
    role: Role
    url: str


def role_of(name: str) -> str:
    """The role of the engine with this name: names begin with the role."""
    return name.partition("-")[0]


class Topology:
    """The current engines, in the order given to the last `replace`."""

    def __init__(
        self, engines: Sequence[EngineEndpoint], down: Mapping[str, str] | None = None
    ) -> None:
        self.replace(engines, down or {})

    def of(self, role: Role) -> Sequence[EngineEndpoint]:
        """The engines of one role."""
        return self._by_role[role]

    def knows(self, role: Role) -> bool:
        """Whether the deployment has engines of this role, up or down."""
        return bool(self.of(role)) or any(role_of(name) == role for name in self.down)

    def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, str]) -> None:
        """Use these engines from now on. `down`: for each engine that is missing, by name, why."""
        self.engines, self.down = tuple(engines), down
        self._by_role: dict[Role, Sequence[EngineEndpoint]] = {
            role: tuple(engine for engine in engines if engine.role == role)
            for role in get_args(Role)
        }
