"""`disagg scale` and `disagg apply`: find the deployment, give the order, show what comes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from rich.console import Console

from disagg.cluster.control import Apply, Deployments, News, Order, Scale, deployments
from disagg.cluster.ray_session import private_addresses, visit
from disagg.config import Deployment, Role
from disagg.errors import ConfigError, StartupError

_WAIT_S, _ANSWER_S = 10.0, 30.0
_MUTE_S, _AGAIN_S = 15.0, 0.5


def scale(
    replicas: Mapping[Role, int], *, name: str | None, address: str | None, wait: bool
) -> int:
    """Ask for other numbers of engines. Returns the exit status."""
    return _give(Scale(replicas), name, address, wait)


def apply(deployment: Deployment, *, address: str | None, wait: bool) -> int:
    """Ask for engines as in a changed file. Returns the exit status."""
    return _give(Apply(deployment), deployment.name, address, wait)


def _give(order: Order, name: str | None, address: str | None, wait: bool) -> int:
    console = Console(soft_wrap=True, highlight=False)
    with _found(name, address, console) as control:
        try:
            number, after = ray.get(control.give.remote(order), timeout=_ANSWER_S)
            while wait:
                asked = control.follow.remote(number, after, _WAIT_S)
                news: News = ray.get(asked, timeout=_WAIT_S + _ANSWER_S)
                after = news.after
                for line in news.lines:
                    console.print(line, markup=False)
                if (outcome := news.outcome) is not None:
                    if outcome.word == "refused":
                        raise ConfigError(list(outcome.problems))
                    console.print(outcome.word, markup=False)
                    return 0 if outcome.word == "done" else 1
        except RayError as error:
            raise StartupError(
                f"the deployment gives no answer any more ({type(error).__name__}); if disagg "
                "status shows that it serves, look whether it is done, and ask again if not"
            ) from None
        except KeyboardInterrupt:
            console.print("Not waiting any longer; it goes on.")
            return 130
    console.print("asked; disagg status shows how it goes")
    return 0


@contextmanager
def _found(name: str | None, address: str | None, console: Console) -> Iterator[Any]:
    """The control of the one deployment that is meant, and a connection to its Ray."""
    given = address or os.environ.get("RAY_ADDRESS")
    seen: list[str] = []
    mute: list[str] = []
    meant: list[tuple[str, str]] = []
    for place in [given] if given else private_addresses():
        with visit(place):
            there = _deployments(name, console)
        mute.extend(there.mute)
        for run, (its_name, _) in there.by_run.items():
            seen.append(its_name)
            if name in (None, its_name, run):
                meant.append((place, run))
    if len(meant) != 1:
        raise ConfigError(_not_one(name, [run for _, run in meant], seen, mute, given))
    ((place, run),) = meant
    with visit(place):
        found = _deployments(run, console).by_run.get(run)
        if found is None:
            raise StartupError("the deployment ended meanwhile")
        yield found[1]


def _deployments(name: str | None, console: Console) -> Deployments:
    """Those on this Ray; one whose supervisor died a moment ago is waited for if it may be meant.

    A run is called by its deployment's name and a number.
    """
    deadline, said = time.monotonic() + _MUTE_S, False
    while True:
        found = deployments()
        awaited = [run for run in found.mute if name is None or run.startswith(name)]
        if not awaited or time.monotonic() > deadline:
            return found
        if not said:
            waits = f"the supervisor of {', '.join(awaited)}"
            console.print(f"waiting up to {_MUTE_S:g} s for {waits}, which does not answer yet")
            said = True
        time.sleep(_AGAIN_S)


def _not_one(
    name: str | None, runs: list[str], seen: list[str], mute: list[str], address: str | None
) -> str:
    where = f"on Ray at {address}" if address else "on this machine"
    if runs:
        return f"several deployments run {where}: {', '.join(runs)}; choose one with --name"
    if awaited := [run for run in mute if name is None or run.startswith(name)]:
        which = "starts or is being healed" if len(awaited) == 1 else "start or are being healed"
        return f"{', '.join(awaited)} {which}; ask again when disagg status shows that it serves"
    if seen:
        return f"no deployment {name!r} runs {where}, but {', '.join(seen)}; see --name"
    elsewhere = "" if address else "; of another one, give Ray's address (--address, RAY_ADDRESS)"
    return f"no deployment runs {where}{elsewhere}"
