"""Runs the suites that matter with each version of vLLM: `make matrix`.

    make matrix                                  all versions, all suites; an hour on two cores
    make matrix VLLM="0.31.0" SUITES=exactness   some of them

Versions with a CPU build run real engines, and hand requests over to the installed version. Of
those for GPUs alone, the Python sources are compared (`tests/vllm_next.py`), and the connectors run
under their schedulers. Prints a line as each suite ends and a table at the end; exit status 1 if
any failed. The output of each suite stays in `.cache/matrix` until it runs again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from vllm_environments import ROOT, Environment, of_cpu_build, of_sources

from disagg.tables import show

CPU_BUILDS = ("0.29.0", "0.30.0", "0.31.0")
"""Besides the installed one, with which `make test` runs."""
GPU_BUILDS = ("0.33.0",)
LOGS = ROOT / ".cache" / "matrix"
_LIMIT_S = 3600


@dataclass(frozen=True)
class Suite:
    """tests: paths. engines: it runs real ones. here: the installed vLLM runs it, beside engines of
    the other version."""

    name: str
    tests: tuple[str, ...]
    engines: bool = True
    here: bool = False


SUITES = (
    Suite("connector", ("tests/unit/connector",), engines=False),
    Suite("engine", ("tests/unit/engine", "tests/unit/vllm_compat"), engines=False),
    Suite("exactness", ("tests/engine/test_exactness.py",)),
    Suite("params", ("tests/engine/test_params.py",)),
    Suite("failure", ("tests/engine/test_faults.py",)),
    Suite("streaming", ("tests/engine/test_followed.py",)),
    Suite("versions", ("tests/engine/test_versions.py",), here=True),
    Suite("upgrade", ("tests/engine/test_rolling_upgrade.py",), here=True),
)
COMPARED = "compared"
"""What is named for sources in place of a suite: `vllm_next.py` over them."""


@dataclass(frozen=True)
class Result:
    """passed, failed, skipped: how many tests. An empty one never ran."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        return f"{self.passed} / {self.failed} / {self.skipped}"


def run(suite: Suite, environment: Environment, log: Path) -> Result:
    """Run a suite in a process of its own; its output goes to `log`."""
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)  # of an earlier run
    python = Path(sys.executable) if suite.here else environment.python
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
    ]
    command += [f"--junitxml={report}", *suite.tests]
    variables = os.environ | environment.variables
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, (environment.variables.get("PYTHONPATH"), str(ROOT), str(ROOT / "tests")))
    )
    if suite.here:
        variables["DISAGG_TEST_OTHER_VLLM"] = str(environment.python)
    with log.open("w") as output:
        try:
            subprocess.run(
                command, cwd=ROOT, env=variables, stdout=output, stderr=output, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return Result(failed=1)
    return counted(report)


def counted(report: Path) -> Result:
    """What pytest's report says; one failed test if there is none."""
    try:
        suites = ElementTree.parse(report).getroot().iter("testsuite")
        sums = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in suites:
            for name in sums:
                sums[name] += int(suite.get(name, "0"))
    except (OSError, ElementTree.ParseError):
        return Result(failed=1)
    failed = sums["failures"] + sums["errors"]
    return Result(sums["tests"] - failed - sums["skipped"], failed, sums["skipped"])


def compared(environment: Environment, log: Path) -> Result:
    """`vllm_next.py` over unpacked sources, as one test."""
    sources = environment.variables["PYTHONPATH"]
    command: list[str | Path] = [sys.executable, ROOT / "tests" / "vllm_next.py", sources]
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=_LIMIT_S)
    return Result(failed=1) if done.returncode else Result(passed=1)


def table(results: Mapping[tuple[str, str], Result], names: Sequence[str]) -> Table:
    """Versions by suites: passed / failed / skipped."""
    made = Table("vLLM", *names, title="passed / failed / skipped")
    for version in dict.fromkeys(version for version, _ in results):
        cells = (results.get((version, name)) for name in names)
        made.add_row(version, *(str(cell) if cell else "" for cell in cells))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", nargs="*", default=[], help="versions; all by default")
    parser.add_argument("--suites", nargs="*", default=[], help="suites; all by default")
    parser.add_argument("--logs", type=Path, default=LOGS, help="a folder for each suite's output")
    options = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    results: dict[tuple[str, str], Result] = {}
    options.logs.mkdir(parents=True, exist_ok=True)
    for version in options.vllm or (*CPU_BUILDS, *GPU_BUILDS):
        console.print(f"vLLM {version}: environment")
        make = of_sources if version in GPU_BUILDS else of_cpu_build
        wanted = set(options.suites)
        for name, result in _results(make(version), wanted, options.logs, console):
            results[version, name] = result
    show(table(results, [*(suite.name for suite in SUITES), COMPARED]))
    return 1 if any(result.failed for result in results.values()) else 0


def _results(
    environment: Environment, wanted: set[str], logs: Path, console: Console
) -> list[tuple[str, Result]]:
    found = []
    names = [suite.name for suite in SUITES if not (environment.is_source and suite.engines)]
    names += [COMPARED] if environment.is_source else []
    by_name = {suite.name: suite for suite in SUITES}
    for name in (name for name in names if not wanted or name in wanted):
        log, begun = logs / f"{environment.version}-{name}.log", time.monotonic()
        if name == COMPARED:
            result = compared(environment, log)
        else:
            result = run(by_name[name], environment, log)
        seconds = time.monotonic() - begun
        console.print(f"vLLM {environment.version}: {name}: {result} in {seconds:.0f} s")
        if result.failed:
            console.print("\n".join([*log.read_text().splitlines()[-40:], str(log)]), markup=False)
        found.append((name, result))
    return found


if __name__ == "__main__":
    sys.exit(main())
