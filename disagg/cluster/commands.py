"""`disagg scale` and `disagg apply`: find the deployment, send the command, show its progress."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from rich.console import Console

from disagg.cluster.control import Apply, Command, CommandProgress, Deployments, Scale, deployments
from disagg.cluster.ray_session import private_addresses, visit
from disagg.config import Deployment, Role
from disagg.errors import ConfigError, StartupError

_WAIT_S, _ANSWER_S = 10.0, 30.0
_UNRESPONSIVE_S, _AGAIN_S = 15.0, 0.5


def scale(
    replicas: Mapping[Role, int], *, name: str | None, address: str | None, wait: bool
) -> int:
    """Change the numbers of engines. Returns the exit status."""
    return _submit(Scale(replicas), name, address, wait)


def apply(deployments: Sequence[Deployment], *, address: str | None, wait: bool) -> int:
    """Replace engines to match a changed file, one deployment after the other; it ends with the
    first that cannot be changed. Returns the exit status."""
    for deployment in deployments:
        if status := _submit(Apply(deployment), deployment.name, address, wait):
            return status
    return 0


def _submit(command: Command, name: str | None, address: str | None, wait: bool) -> int:
    console = Console(soft_wrap=True, highlight=False)
    with _found(name, address, console) as control:
        try:
            number, after = ray.get(control.submit.remote(command), timeout=_ANSWER_S)
            while wait:
                asked = control.follow.remote(number, after, _WAIT_S)
                progress: CommandProgress = ray.get(asked, timeout=_WAIT_S + _ANSWER_S)
                after = progress.after
                for line in progress.lines:
                    console.print(line, markup=False)
                if (outcome := progress.outcome) is not None:
                    if outcome.result == "refused":
                        raise ConfigError(list(outcome.problems))
                    console.print(outcome.result, markup=False)
                    return 0 if outcome.result == "done" else 1
        except RayError as error:
            raise StartupError(
                f"the supervisor stopped answering ({type(error).__name__}) and may have dropped "
                "the command; check disagg status, and run the command again if it was not done"
            ) from None
        except KeyboardInterrupt:
            console.print("Stopped waiting; the deployment continues with the command.")
            return 130
    console.print("sent; disagg status shows the progress")
    return 0


@contextmanager
def _found(name: str | None, address: str | None, console: Console) -> Iterator[Any]:
    """The supervisor of the one deployment that matches, within a connection to its Ray.

    Raises ConfigError if no deployment matches, or several.
    """
    given = address or os.environ.get("RAY_ADDRESS")
    seen: list[str] = []
    unresponsive: list[str] = []
    matching: list[tuple[str, str]] = []
    for ray_address in [given] if given else private_addresses():
        with visit(ray_address, private=not given):
            there = _deployments(name, console)
        unresponsive.extend(there.unresponsive)
        for run, (its_name, _) in there.by_run.items():
            seen.append(its_name)
            if name in (None, its_name, run):
                matching.append((ray_address, run))
    if len(matching) != 1:
        runs = [run for _, run in matching]
        raise ConfigError(_not_one(name, runs, seen, unresponsive, given))
    ((ray_address, run),) = matching
    with visit(ray_address, private=not given):
        found = _deployments(run, console).by_run.get(run)
        if found is None:
            raise StartupError("the deployment ended meanwhile")
        yield found[1]


def _deployments(name: str | None, console: Console) -> Deployments:
    """The deployments on this Ray.

    Waits up to `_UNRESPONSIVE_S` for a supervisor that does not answer, if its deployment may have
    this name: a supervisor that died restarts within seconds. A run's id is the deployment's name
    and a random number.
    """
    deadline, said = time.monotonic() + _UNRESPONSIVE_S, False
    while True:
        found = deployments()
        awaited = [run for run in found.unresponsive if name is None or run.startswith(name)]
        if not awaited or time.monotonic() > deadline:
            return found
        if not said:
            console.print(
                f"waiting up to {_UNRESPONSIVE_S:g} s for the supervisor of {', '.join(awaited)}, "
                "which does not answer"
            )
            said = True
        time.sleep(_AGAIN_S)


def _not_one(
    name: str | None, runs: list[str], seen: list[str], unresponsive: list[str], address: str | None
) -> str:
    where = f"on Ray at {address}" if address else "on this machine"
    if runs:
        return f"several deployments run {where}: {', '.join(runs)}; choose one with --name"
    if awaited := [run for run in unresponsive if name is None or run.startswith(name)]:
        return (
            f"{', '.join(awaited)}: the supervisor does not answer, because it starts or restarts; "
            "try again when disagg status shows that the deployment serves"
        )
    if seen:
        return f"no deployment {name!r} runs {where}, but {', '.join(seen)}; see --name"
    advice = "" if address else "; for another machine, give Ray's address (--address, RAY_ADDRESS)"
    return f"no deployment runs {where}{advice}"
