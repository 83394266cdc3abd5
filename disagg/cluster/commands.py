"""`disagg scale`, `apply` and `logs`: find the deployment, send the command, show its progress."""

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
from disagg.errors import ConfigError, DisaggError, StartupError
from disagg.local.running import find

_WAIT_S, _ANSWER_S = 10.0, 30.0
_UNRESPONSIVE_S, _AGAIN_S = 15.0, 0.5
_FOLLOW_S = 0.5


def scale(
    replicas: Mapping[Role, int], *, name: str | None, address: str | None, wait_s: float
) -> int:
    """Change the numbers of engines. Waits up to `wait_s` for the end, and prints the progress; 0:
    not at all. Returns the exit status. Raises `DisaggError` if it takes longer."""
    return _submit(Scale(replicas), name, address, wait_s)


def apply(deployments: Sequence[Deployment], *, address: str | None, wait_s: float) -> int:
    """Replace engines to match a changed file, one deployment after the other; it ends with the
    first that cannot be changed. Waits as `scale` does. Returns the exit status."""
    for deployment in deployments:
        if status := _submit(Apply(deployment), deployment.name, address, wait_s):
            return status
    return 0


def logs(
    name: str | None, *, engine: str | None, lines: int, follow: bool, address: str | None
) -> int:
    """Print the last lines of engines' logs, and with `follow` those to come. Returns the exit
    status. Raises ConfigError if there is no such engine."""
    console = Console(soft_wrap=True, highlight=False)
    given = address or os.environ.get("RAY_ADDRESS")
    wanted = None if given else find(name).run
    for ray_address in [given] if given else private_addresses():
        with visit(ray_address, private=not given):
            engines = _engines(wanted, name)
            if not engines:
                continue
            if engine is not None and engine not in engines:
                raise ConfigError(f"--engine: {engine!r} — there are: {', '.join(sorted(engines))}")
            shown = {engine: engines[engine]} if engine is not None else engines
            try:
                _print_logs(shown, lines, follow, console)
            except KeyboardInterrupt:
                return 130
            return 0
    raise ConfigError("no engine of this deployment has started yet; try again")


def _engines(run: str | None, name: str | None) -> dict[str, Any]:
    """The engines' actors of a run, or of the only deployment with this name on this Ray."""
    runs: dict[str, dict[str, Any]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        role, _, number = actor["name"].rpartition("-")
        if role not in ("prefill", "decode") or not number.isdecimal():
            continue
        if run in (None, actor["namespace"]):
            runs.setdefault(actor["namespace"], {})[actor["name"]] = actor["namespace"]
    if run is None:
        # A run's id is the deployment's name and a random number.
        runs = {r: e for r, e in runs.items() if name in (None, r, r.rpartition("-")[0])}
    if len(runs) > 1:
        raise ConfigError(f"several deployments run there: name one of {', '.join(sorted(runs))}")
    return next(iter(runs.values()), {})


def _print_logs(engines: Mapping[str, str], lines: int, follow: bool, console: Console) -> None:
    after: dict[str, int | None] = dict.fromkeys(sorted(engines))
    gone = set[str]()
    while True:
        for name in after:
            try:
                actor: Any = ray.get_actor(name, engines[name])
                asked = actor.log.remote(after[name], lines)
                text, after[name] = ray.get(asked, timeout=_ANSWER_S)
                gone.discard(name)
            except (ValueError, RayError) as error:
                if name not in gone:
                    console.print(f"{name}: no answer ({type(error).__name__})", markup=False)
                gone.add(name)
                after[name] = None  # the next process has a log of its own
                continue
            for line in text.splitlines():
                console.print(f"{name}  {line}", markup=False)
        if not follow or len(gone) == len(after):
            return
        time.sleep(_FOLLOW_S)


def _submit(command: Command, name: str | None, address: str | None, wait_s: float) -> int:
    console = Console(soft_wrap=True, highlight=False)
    deadline, wait = time.monotonic() + wait_s, wait_s > 0
    with _found(name, address, console) as control:
        try:
            number, after = ray.get(control.submit.remote(command), timeout=_ANSWER_S)
            while wait:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise DisaggError(
                        f"not done within {wait_s:g} s; the deployment goes on with the command. "
                        "The lines above say what it waits for, disagg status what it has"
                    )
                asked = control.follow.remote(number, after, min(_WAIT_S, left_s))
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
