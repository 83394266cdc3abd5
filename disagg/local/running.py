"""What `disagg serve` runs on this machine: one small file per deployment, in this user's folder.

So commands find a deployment by its name. A file whose process has ended is removed by whoever
reads it; nothing else depends on these files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from disagg.errors import ConfigError
from disagg.identity import process
from disagg.private_files import PrivateFolder, user_folder

_SUFFIX = ".running"
_MOST_BYTES = 16 << 10


@dataclass(frozen=True)
class Running:
    """One deployment.

    run: its id, unique. url, socket: of its router; empty until that answers. owner: the process of
    `disagg serve` (`identity.process`), whose id is pid. since: Unix time of its start.
    """

    name: str
    run: str
    model: str
    owner: str
    pid: int
    since: float
    url: str = ""
    socket: str = ""

    @property
    def state(self) -> str:
        """In a word."""
        return "serves" if self.url else "starts"


class Announced:
    """The file of one deployment of this process. Raises ConfigError if it cannot be written."""

    def __init__(self, name: str, run: str, model: str) -> None:
        self._folder = user_folder().make("TMPDIR")
        self._running = Running(name, run, model, process.name(), os.getpid(), time.time())
        self._write()

    def serves(self, url: str, socket: str) -> None:
        """The router answers there."""
        self._running = Running(**asdict(self._running) | {"url": url, "socket": socket})
        self._write()

    def remove(self) -> None:
        """The deployment has ended."""
        self._folder.remove(self._running.run + _SUFFIX)

    def _write(self) -> None:
        draft, name = f".{self._running.run}", self._running.run + _SUFFIX
        try:
            self._folder.write_bytes(draft, json.dumps(asdict(self._running)).encode())
            self._folder.rename(draft, name)
        except OSError as error:
            raise ConfigError(f"TMPDIR: {self._folder.path}: {error.strerror}") from error


def running() -> Sequence[Running]:
    """The deployments of this user on this machine, oldest first."""
    folder = user_folder()
    try:
        names = folder.names()
    except OSError:
        return []  # nothing ever ran, or the folder is not ours
    found = [_read(folder, name) for name in names if name.endswith(_SUFFIX)]
    return sorted((one for one in found if one is not None), key=lambda one: one.since)


def _read(folder: PrivateFolder, name: str) -> Running | None:
    try:
        found = Running(**json.loads(folder.read_bytes(name, _MOST_BYTES)))
    except (OSError, ValueError, TypeError):
        return None
    if process.is_dead(found.owner):
        folder.remove(name)
        return None
    return found


def find(name: str | None) -> Running:
    """The deployment of this name or id; the only one, without a name. Raises ConfigError."""
    there = running()
    matching = [one for one in there if name in (None, one.name, one.run)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        runs = ", ".join(one.run for one in matching)
        raise ConfigError(f"several deployments run on this machine: name one of {runs}")
    names = ", ".join(one.name for one in there)
    if names:
        raise ConfigError(f"{name}: no such deployment runs on this machine, but {names}")
    raise ConfigError(
        "no deployment of yours runs on this machine" + (f", so no {name!r}" if name else "")
    )
