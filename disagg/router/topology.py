"""The engines that the router knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.config import Role


@dataclass(frozen=True)
class EngineEndpoint:
    """One engine: its name (`prefill-0`), its role, and where its OpenAI server listens."""

    name: str
    role: Role
    url: str


@dataclass(frozen=True)
class Topology:
    """All engines, in the order they were given."""

    engines: Sequence[EngineEndpoint]

    def of(self, role: Role) -> list[EngineEndpoint]:
        """The engines of one role."""
        return [engine for engine in self.engines if engine.role == role]
