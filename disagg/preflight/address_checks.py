"""Checks of the addresses that vLLM's arguments fix for engines which may share a node."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from disagg.config import Deployment
from disagg.config_file import show
from disagg.engine.args import KV_EVENTS, kv_event_endpoints, kv_events
from disagg.preflight.argument_keys import ROLES, key_of

_LAST_PORT = 65535


def address_problems(deployment: Deployment, taken: dict[str, str], *, here: bool) -> Iterator[str]:
    """Addresses of KV events that two engines would share. taken: those of other deployments, with
    the engine's name; this one's are added. here: all engines run on this machine, so their ports
    must be free on it."""
    for role in ROLES:
        given = kv_events(deployment, role)
        pool = deployment.pool(role)
        most = pool.autoscale.max_replicas if pool.autoscale else pool.replicas
        key = key_of(deployment, role, KV_EVENTS)
        for index in range(most * deployment.data_parallel_size(role) if given else 0):
            for name, address in kv_event_endpoints(deployment, role, index).items():
                if (place := _place(name, address)) is None:
                    continue
                engine = f"{deployment.group}/{role}-{index}".removeprefix("/")
                shown = f"{key}.{name}: {show((given or {}).get(name, 'not set'))}"
                if place in taken:
                    yield (
                        f"{shown} — {engine} and {taken[place]} would both listen on {address}; "
                        "set an address further away"
                    )
                    return
                taken[place] = engine
                if problem := _port_problem(place, here):
                    yield f"{shown} — {engine} would listen on {address}, {problem}"
                    return


def _place(name: str, address: str) -> str | None:
    """What two engines cannot both bind: a port's number, or a socket's path."""
    if address.startswith("ipc://"):
        return address
    binds = name == "replay_endpoint" or "*" in address or "::" in address
    port = address.rpartition(":")[2]
    return port if binds and address.startswith("tcp://") and port not in ("", "0") else None


def _port_problem(place: str, here: bool) -> str | None:
    if not place.isdecimal():
        return None if place.startswith("ipc://") else "which has no port; write tcp://*:PORT"
    if int(place) > _LAST_PORT:
        return "and ports end at 65535; set a lower one"
    if not here:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(place)))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "which is in use; set another port, or 0 for any free one"
    return None
