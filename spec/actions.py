"""How models write their actions: one function each, registered with its name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from spec.checker import Action

SetupT = TypeVar("SetupT")
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Description:
    """As in `checker.Action`."""

    name: str
    by: str
    implements: tuple[str, ...]


@dataclass(frozen=True)
class _Written(Description, Generic[SetupT, S]):
    step: Callable[[SetupT, S], Iterator[S]]


@dataclass(frozen=True)
class Actions(Generic[SetupT, S]):
    """A model's actions, before they are bound to one setup."""

    written: list[_Written[SetupT, S]] = field(default_factory=list)

    def add(
        self, name: str, by: str, *implements: str
    ) -> Callable[[Callable[[SetupT, S], Iterator[S]]], Callable[[SetupT, S], Iterator[S]]]:
        """Register a function. by: whose step it is; `chance` for one that need not happen.
        implements: the full names of functions that do it."""

        def register(
            step: Callable[[SetupT, S], Iterator[S]],
        ) -> Callable[[SetupT, S], Iterator[S]]:
            self.written.append(_Written(name, by, implements, step))
            return step

        return register

    def bound(self, setup: SetupT) -> list[Action[S]]:
        """The actions of a run."""
        return [
            Action(one.name, one.by, one.implements, partial(one.step, setup))
            for one in self.written
        ]
