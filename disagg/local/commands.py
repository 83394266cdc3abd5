"""`disagg ls` and `disagg stop`: the deployments of this user on this machine."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from disagg.errors import ConfigError, DisaggError
from disagg.identity import process
from disagg.local.running import Running, find, running

_POLL_S = 0.1


def show(*, as_json: bool) -> int:
    """Print the deployments. Returns 0."""
    there = running()
    if as_json:
        print(json.dumps([asdict(one) | {"state": one.state} for one in there], indent=2))
        return 0
    console = Console(highlight=False)
    if not there:
        console.print("no deployment of yours runs on this machine")
        return 0
    table = Table("model", box=SIMPLE)
    for column in ("name", "state", "since", "router", "process"):
        table.add_column(column, no_wrap=True)
    for one in there:
        since = time.strftime("%b %d %H:%M", time.localtime(one.since))
        table.add_row(one.model, one.name, one.state, since, one.url or "-", str(one.pid))
    console.print(table)
    return 0


def stop(name: str | None, *, timeout_s: float) -> int:
    """End a deployment in order, and wait for it. Returns 0; raises DisaggError if it takes longer,
    ConfigError if there is no such deployment."""
    found = find(name)
    others = [one.name for one in running() if one.owner == found.owner and one.run != found.run]
    console = Console(highlight=False, soft_wrap=True)
    beside = f", with {', '.join(others)} of the same file" if others else ""
    console.print(f"stopping {found.name}{beside} (process {found.pid})")
    began = time.monotonic()
    _terminate(found)
    while not process.is_dead(found.owner):
        if time.monotonic() - began > timeout_s:
            raise DisaggError(
                f"{found.name} has not ended within {timeout_s:g} s: its output says what it waits "
                f"for. A second signal ends it at once: kill {found.pid}"
            )
        time.sleep(_POLL_S)
    console.print(f"stopped after {time.monotonic() - began:.1f} s")
    return 0


def _terminate(found: Running) -> None:
    """SIGTERM to this very process, not to one that got its id later."""
    try:
        handle = os.pidfd_open(found.pid)
    except ProcessLookupError:
        return
    try:
        if process.is_dead(found.owner) is None:
            raise ConfigError(
                f"{found.name}: runs in another container or on another host; stop it there"
            )
        if not process.is_dead(found.owner):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    finally:
        os.close(handle)
