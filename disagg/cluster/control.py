"""Commands for a deployment, their progress, and how the command line finds the deployment on Ray.

Everybody who can reach Ray can reach the supervisor's actor, and nobody else can. That is enough:
with access to Ray one can run any code there. This module must never decide what a command does.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from disagg.config import Deployment, Role

NAME = "supervisor-"
"""Prefix of the name of a supervisor's actor; a number follows."""
NAME_TIMEOUT_S = 2.0
_MAX_LINES = 1000


@dataclass(frozen=True)
class Scale:
    """Set the number of engines of these pools."""

    replicas: Mapping[Role, int]


@dataclass(frozen=True)
class Apply:
    """Change the running deployment to this one."""

    deployment: Deployment


Command = Scale | Apply


CommandResult = Literal["done", "refused", "taken back"]


@dataclass(frozen=True)
class CommandOutcome:
    """How a command ended, and the reasons if it failed.

    refused: nothing was changed. taken back: an engine did not start, and the change was undone.
    """

    result: CommandResult
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class CommandProgress:
    """lines: log lines after line number `after` of the call. after: the number of the last line.
    outcome: None while the command runs."""

    lines: Sequence[str]
    after: int
    outcome: CommandOutcome | None


@dataclass
class _CommandState:
    command: Command
    outcome: CommandOutcome | None = None


class Commands:
    """The supervisor's side of commands. This base class never has one."""

    def take(self) -> tuple[int, Command] | None:
        """The number of the next command, and the command; None if there is none."""
        return None

    def say(self, line: str) -> None:
        """Add a log line."""

    def finish(self, number: int, result: CommandResult, problems: Sequence[str] = ()) -> None:
        """The command has ended."""


class Control(Commands):
    """Carries commands from the actor's event loop to the supervisor's thread, and log lines back.

    If the actor dies, pending commands are dropped, and the command line reports it. The change of
    a command that has started goes on: the next supervisor gets it as the wanted state.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._commands: list[_CommandState] = []
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._said = 0
        self._changed = asyncio.Event()

    # ---- commands, on the loop -----------------------------------------------------------------

    def submit(self, command: Command) -> tuple[int, int]:
        """Add a command. Returns its number, and the line number from which to `follow` it."""
        self._commands.append(_CommandState(command))
        number = len(self._commands) - 1
        self._waiting.put(number)
        return number, self._said

    async def follow(self, number: int, after: int, wait_s: float) -> CommandProgress:
        """The log lines after line `after`. Waits up to `wait_s` for a line or the outcome."""
        state = self._commands[number]
        if self._said == after and state.outcome is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        fresh = min(self._said - after, len(self._lines))
        lines = list(self._lines)[len(self._lines) - fresh :]
        return CommandProgress(lines, self._said, state.outcome)

    # ---- the supervisor, from any thread -------------------------------------------------------

    def take(self) -> tuple[int, Command] | None:
        try:
            number = self._waiting.get_nowait()
        except queue.Empty:
            return None
        return number, self._commands[number].command

    def say(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._say, line)

    def finish(self, number: int, result: CommandResult, problems: Sequence[str] = ()) -> None:
        self._loop.call_soon_threadsafe(
            self._finish, number, CommandOutcome(result, tuple(problems))
        )

    def _say(self, line: str) -> None:
        self._lines.append(line)
        self._said += 1
        self._changed.set()

    def _finish(self, number: int, outcome: CommandOutcome) -> None:
        self._commands[number].outcome = outcome
        self._changed.set()


@dataclass(frozen=True)
class Deployments:
    """The deployments on one Ray. by_run: name and supervisor of each that serves, by run id.
    unresponsive: ids of runs whose supervisor does not answer, or not yet."""

    by_run: Mapping[str, tuple[str, Any]]
    unresponsive: Sequence[str]


def deployments() -> Deployments:
    """The deployments on the Ray that this process is connected to."""
    by_run: dict[str, tuple[str, Any]] = {}
    unresponsive = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if not actor["name"].startswith(NAME):
            continue
        run = actor["namespace"]
        try:
            supervisor: Any = ray.get_actor(actor["name"], run)
            name: str = ray.get(supervisor.name.remote(), timeout=NAME_TIMEOUT_S)
        except (ValueError, AttributeError):
            continue  # the actor has just ended, or belongs to another program
        except RayError:
            unresponsive.append(run)
            continue
        by_run[run] = name, supervisor
    return Deployments(by_run, unresponsive)
