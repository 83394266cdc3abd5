"""Engines in a file that is watched: YAML or JSON, with the keys `prefill` and `decode`.

The file is read every few seconds, and a new content counts once it was read twice in a row, so
that a file that is just being written is not believed. Contents are compared, not times: a rename,
a new target of a symbolic link and a write in place are seen alike. A file that is missing, wrong
or half written changes nothing.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import Field, ValidationError

from disagg.config import Role, Section
from disagg.config_file import explain, mapping_in
from disagg.errors import ConfigError
from disagg.router.discovery.source import Report, SaidOnce, in_thread
from disagg.router.topology import EngineEndpoint, parse_endpoint

_MOST_BYTES = 1 << 20


class _Listed(Section):
    """The file's content."""

    prefill: list[str] = Field([])
    decode: list[str] = Field([])


class WatchedFile:
    """`refresh_s`: between two looks."""

    roles: frozenset[Role] = frozenset()  # those that it names, and no others

    def __init__(self, path: Path, refresh_s: float) -> None:
        self.name = f"engines.file {path}"
        self._path, self._refresh_s = path, refresh_s
        self._problems = SaidOnce(self.name)
        self._used: bytes | None = None

    def first(self) -> Sequence[EngineEndpoint]:
        """The engines at the router's start; none if there is no file yet. Raises ConfigError if
        the file is wrong."""
        try:
            data = _read(self._path)
        except OSError:
            return []
        engines = engines_in(data, self._path)
        self._used = data
        return engines

    async def run(self, report: Report) -> None:
        """Report the engines of each good content of the file."""
        last: bytes | None = None
        while True:
            try:
                data = await in_thread(lambda: _read(self._path))
                if data == self._used:
                    self._problems.over()
                elif data == last:
                    report(engines_in(data, self._path))
                    self._used = data
                    self._problems.over()
                last = data
            except OSError as error:
                self._problems.problem(error.strerror or str(error))
            except ConfigError as error:
                self._problems.problem("; ".join(error.problems))
            await asyncio.sleep(self._refresh_s)


def engines_in(data: bytes, path: Path) -> list[EngineEndpoint]:
    """The engines that a file with these bytes names. Raises ConfigError."""
    content = mapping_in(data, path, "write decode: [] if there are no engines")
    try:
        listed = _Listed.model_validate(content)
    except ValidationError as error:
        raise ConfigError([f"{path}: {line}" for line in explain(error, _Listed)]) from error
    urls: list[tuple[Role, str]] = [
        (role, url) for role in get_args(Role) for url in getattr(listed, role)
    ]
    return [parse_endpoint("", role, url, f"{path}: {role}") for role, url in urls]


def _read(path: Path) -> bytes:
    """Raises OSError, also for what is no file: a pipe would block for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("is no regular file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(f"is over {_MOST_BYTES} bytes")
    return data
