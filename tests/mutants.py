"""Mutation testing: `make mutants`.

Writes small faults (`mutations.py`) into copies of the project, one at a time, and runs the unit
tests that execute the changed line. A mutant that no test notices is a rule without a test, code
that nobody needs, or equal to the original. What is known is kept in `.cache/mutants`, so a run
that was interrupted goes on, and `report.md` there names the survivors.

Test processes are forks of one that has imported vLLM. Code that tests run in other processes is
not measured: what `tests/transport` and `tests/engine` alone notice survives here.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import hashlib
import importlib
import json
import os
import py_compile
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest
from mutations import Mutation, mutations

ROOT = Path(__file__).parents[1]
STATE = ROOT / ".cache" / "mutants"
MODULES = (
    *(f"transport/control/{name}" for name in ("lease", "ticket", "server", "client")),
    *(f"transport/one_sided/{name}" for name in ("lease_board", "remote_lease_board")),
    "transport/one_sided/hazard_pointers",
    *(f"transport/{name}" for name in ("blocks", "fetch")),
    *(f"connector/handoff/{name}" for name in ("sharding", "block_digests", "stall")),
    *(f"connector/handoff/{name}" for name in ("scheduler", "producer_scheduler")),
    *(f"connector/handoff/{name}" for name in ("consumer_scheduler", "producer_worker")),
    *(f"connector/handoff/{name}" for name in ("consumer_worker", "per_peer_threads")),
    *(f"connector/{name}" for name in ("load_admission", "recurrent_state", "kv_cache_layout")),
    *(f"store/{name}" for name in ("host_index", "directory_index", "directory_space")),
    *(f"router/pairing/{name}" for name in ("policies", "admission")),
    *(f"router/{name}" for name in ("engines/health", "request/replay", "upstream/http1")),
    "cluster/supervisor/autoscaling",
)
# A module's tests are those of its own file, and these.
_HANDOFFS = "connector/handoff/test_modelless.py"
_RANDOM = "connector/handoff/test_random_handoffs.py"
_LEASES = ("transport/one_sided/test_hazard_pointers.py", "spec/test_conformance.py")
_FETCHES = "transport/test_fetch.py"
_ALSO: dict[str, tuple[str, ...]] = {
    "transport/control/lease": _LEASES,
    "transport/control/server": (_FETCHES,),
    "transport/control/client": (_FETCHES, "transport/control/test_opened_transports.py"),
    "transport/one_sided/lease_board": _LEASES,
    "transport/one_sided/remote_lease_board": (_HANDOFFS, _RANDOM),
    "transport/one_sided/hazard_pointers": ("transport/control/test_lease.py", *_LEASES),
    "transport/blocks": (_FETCHES,),
    "connector/handoff/scheduler": (_HANDOFFS, _RANDOM),
    "connector/handoff/producer_scheduler": (_HANDOFFS, _RANDOM),
    "connector/handoff/producer_worker": (_HANDOFFS, _RANDOM),
    "connector/handoff/consumer_worker": (_HANDOFFS, _RANDOM),
    "store/directory_index": ("store/test_directory_model.py",),
    "store/directory_space": ("store/test_directory_model.py", "store/test_directory.py"),
    "router/engines/health": ("router/pairing/test_policies.py",),
    "router/pairing/policies": ("router/pairing/test_absence.py",),
    "router/pairing/admission": (
        "router/pairing/test_absence.py",
        "router/pairing/test_fair_queue.py",
    ),
    "router/request/replay": ("router/request/test_relay.py",),
    "router/upstream/http1": ("router/test_topology.py", "router/test_router.py"),
}
_IMPORTED = ("torch", "vllm.v1.core.sched.scheduler", "vllm.v1.worker.gpu_model_runner", "fastapi")
# Plugins of pytest's are imported before it starts.
_PYTEST = (
    "-qx",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:schemathesis",
    "-m",
    "not slow",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
_TESTS_S = 40.0  # of tests for one mutant, the shortest first
_MAP_S = 900.0
_FAILED = 70
_UNTESTED = "no test executes it"


class Covering(NamedTuple):
    """A test that passes, and the lines of each module that it executes. seconds: its time under
    coverage."""

    id: str
    seconds: float
    lines: dict[str, set[int]]


class Tree:
    """A copy of the project in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder.with_suffix(".out")
        shutil.rmtree(folder, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, found.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        # By content: a mutant may have the size and time of the original.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "disagg", quiet=2, invalidation_mode=checked)

    def fork(self, run: Callable[[], int]) -> int:
        """Start `run` in a process and a process group of its own, in this tree."""
        pid = os.fork()
        if pid:
            return pid
        code = _FAILED
        try:
            os.setsid()
            os.chdir(self.folder)
            output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            paths = [str(self.folder), str(self.folder / "tests")]
            sys.path[:0] = paths
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            code = run()
        finally:
            if code == _FAILED:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)


class Chosen:
    """Keeps the tests with these ids, in this order."""

    def __init__(self, ids: list[str]) -> None:
        self._order = {test: number for number, test in enumerate(ids)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])


class Recorder:
    """Records what each test executes, and how long it takes."""

    def __init__(self, folder: Path) -> None:
        files = [str(folder / "disagg" / f"{name}.py") for name in MODULES]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=files)
        self.seconds = defaultdict[str, float](float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def found(self) -> list[dict[str, Any]]:
        """The tests that passed; "" for what was executed outside of tests."""
        data, tests = self.coverage.get_data(), defaultdict[str, dict[str, list[int]]](dict)
        for name in data.measured_files():
            for line, contexts in data.contexts_by_lineno(name).items():
                for test in contexts:
                    module = name.rpartition("/disagg/")[2].removesuffix(".py")
                    tests[test].setdefault(module, []).append(line)
        return [
            {"id": test, "seconds": self.seconds[test], "lines": lines}
            for test, lines in tests.items()
            if test not in self.failed
        ]


def record(tree: Tree, file: str, into: Path) -> int:
    """In a fork: the map of one file of tests."""
    recorder = Recorder(tree.folder)
    recorder.coverage.start()
    pytest.main([*_PYTEST, "--maxfail=0", file], plugins=[recorder])
    recorder.coverage.stop()
    into.write_text(json.dumps(recorder.found()))
    return 0


def run_tests(ids: list[str]) -> int:
    """In a fork: these tests, up to the first that fails."""
    files = dict.fromkeys(test.partition("::")[0] for test in ids)
    return int(pytest.main([*_PYTEST, *files], plugins=[Chosen(ids)]))


class Job(NamedTuple):
    """What a tree does next. start returns the process; end gets its code, None if it took longer
    than `seconds`."""

    start: Callable[[Tree], int]
    end: Callable[[Tree, int | None], None]
    seconds: float


def work(jobs: list[Job], trees: list[Tree]) -> None:
    """Do all jobs, one in each tree at a time."""
    waiting, running = list(reversed(jobs)), dict[int, tuple[Tree, Job, float]]()
    idle = list(trees)
    try:
        while waiting or running:
            while waiting and idle:
                tree, job = idle.pop(), waiting.pop()
                running[job.start(tree)] = tree, job, time.monotonic() + job.seconds
            time.sleep(0.02)
            for pid, (tree, job, deadline) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done and time.monotonic() < deadline:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                if not done:
                    os.waitpid(pid, 0)
                del running[pid]
                idle.append(tree)
                job.end(tree, os.waitstatus_to_exitcode(status) if done else None)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def test_files(modules: Sequence[str]) -> list[Path]:
    """The tests of these modules, the small files first."""
    unit, found = ROOT / "tests/unit", set[Path]()
    for module in modules:
        own = Path(module)
        found |= {unit / own.with_name(f"test_{own.name}.py")}
        found |= {unit / name for name in _ALSO.get(module, ())}
    return sorted(filter(Path.exists, found), key=lambda file: (file.stat().st_size, file))


def covering(modules: Sequence[str], trees: list[Tree]) -> list[Covering]:
    """The map from tests to lines. It is collected anew for each file of tests that has changed,
    and for all of them when the package has."""
    package = hashlib.sha256()
    for file in sorted((ROOT / "disagg").rglob("*.py")):
        package.update(file.read_bytes())
    jobs, maps = [], []
    for file in test_files(modules):
        content = hashlib.sha256(package.digest() + file.read_bytes()).hexdigest()[:16]
        name = str(file.relative_to(ROOT))
        into = STATE / "map" / f"{content}.json"
        maps.append(into)
        if not into.exists():
            jobs.append(_map_job(name, into))
    (STATE / "map").mkdir(exist_ok=True)
    work(jobs, trees)
    tests = [test for file in maps if file.exists() for test in json.loads(file.read_text())]
    return [
        Covering(
            one["id"], one["seconds"], {name: set(lines) for name, lines in one["lines"].items()}
        )
        for one in tests
    ]


def _map_job(file: str, into: Path) -> Job:
    def ended(tree: Tree, code: int | None) -> None:
        print(f"{file}: {'mapped' if code == 0 else f'no map ({code}), see {tree.output}'}")

    return Job(lambda tree: tree.fork(lambda: record(tree, file, into)), ended, _MAP_S)


def choose(module: str, mutation: Mutation, tests: list[Covering]) -> list[Covering]:
    """The tests that execute the mutated lines. If an import executes them, as it does a class's
    attributes, those of its scope, or else of the module."""
    module_lines = set[int]().union(*(test.lines.get(module, ()) for test in tests))
    for lines in (mutation.lines, mutation.scope, module_lines):
        found = [test for test in tests if not test.lines.get(module, set()).isdisjoint(lines)]
        if not any(test.id == "" for test in found):
            break
    own = f"/unit/{Path(module).parent}/"
    found = [test for test in found if test.id]
    found.sort(key=lambda test: (test.seconds > 1, own not in test.id, test.seconds))
    seconds, chosen = 0.0, list[Covering]()
    for test in found:
        seconds += test.seconds
        if seconds > _TESTS_S and chosen:
            break
        chosen.append(test)
    return chosen


class Results:
    """What is known of mutants, by the mutated module's digest."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.known = {one["key"]: one for one in map(json.loads, lines)}

    def add(self, module: str, mutation: Mutation, **outcome: object) -> None:
        """Keep the outcome of one mutant."""
        shown = {"module": module, "line": mutation.line}
        shown |= {"before": mutation.before, "after": mutation.after}
        one = {"key": key_of(mutation), **shown, **outcome}
        self.known[one["key"]] = one
        with self._file.open("a") as file:
            file.write(json.dumps(one) + "\n")


def key_of(mutation: Mutation) -> str:
    return hashlib.sha256(mutation.source.encode()).hexdigest()[:16]


def mutant_job(module: str, mutation: Mutation, tests: list[Covering], results: Results) -> Job:
    """Try one mutant."""
    ids, seconds = [test.id for test in tests], sum(test.seconds for test in tests)

    def start(tree: Tree) -> int:
        (tree.folder / "disagg" / f"{module}.py").write_text(mutation.source)
        return tree.fork(lambda: run_tests(ids))

    def end(tree: Tree, code: int | None) -> None:
        shutil.copy(ROOT / "disagg" / f"{module}.py", tree.folder / "disagg" / f"{module}.py")
        outcome = "survived" if code == 0 else "killed"
        failed = [
            line
            for line in tree.output.read_text(errors="replace").splitlines()
            if line.startswith(("FAILED", "ERROR"))
        ]
        by = "time" if code is None else failed[0][:150] if failed else f"exit {code}"
        results.add(module, mutation, outcome=outcome, by=by if code != 0 else f"{len(ids)} tests")
        print(f"{outcome:8} {module}:{mutation.line}  {mutation.before} -> {mutation.after}")

    return Job(start, end, 30 + 4 * seconds)


def sampled(module: str, each: int | None, seed: int) -> list[Mutation]:
    """The mutants of a module, or `each` of them: the same ones for the same source and seed."""
    found = mutations((ROOT / "disagg" / f"{module}.py").read_text())
    if each is None or each >= len(found):
        return found
    return random.Random(f"{seed} {module}").sample(found, each)


def report(chosen: dict[str, list[Mutation]], results: Results) -> str:
    """A table of the modules, then the survivors of each."""
    table, survivors = ["| module | made | killed |", "|---|---|---|"], []
    for module, made in chosen.items():
        known = [results.known[key] for key in map(key_of, made) if key in results.known]
        lived = [one for one in known if one["outcome"] != "killed"]
        table.append(f"| `{module}` | {len(known)} | {len(known) - len(lived)} |")
        for one in sorted(lived, key=lambda one: one["line"]):
            survivors += [
                f"disagg/{module}.py:{one['line']} ({one['by']})",
                f"  - {one['before']}",
                f"  + {one['after']}",
            ]
    return "\n".join([*table, "", "Survivors:", "", *survivors, ""])


def main() -> None:
    """Run, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES, help="such as store/host_index")
    parser.add_argument("--each", type=int, default=20, help="how many mutants of each module")
    parser.add_argument("--all", action="store_true", help="all mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are chosen")
    parser.add_argument("--again", action="store_true", help="try survivors again, with new tests")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    STATE.mkdir(parents=True, exist_ok=True)
    gc.disable()
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    trees = [Tree(STATE / f"tree-{number}") for number in range(args.processes)]
    tests, results = covering(args.modules, trees), Results(STATE / "results.jsonl")
    each = None if args.all else args.each
    chosen = {module: sampled(module, each, args.seed) for module in args.modules}
    jobs = list[Job]()
    # One of each module by turns, so that a run that is interrupted has looked at all of them.
    turns = zip_longest(*([(module, one) for one in made] for module, made in chosen.items()))
    for module, mutation in filter(None, chain.from_iterable(turns)):
        known = results.known.get(key_of(mutation))
        if known is not None and (known["outcome"] == "killed" or not args.again):
            if known["by"] != _UNTESTED:
                continue
        covers = choose(module, mutation, tests)
        if covers:
            jobs.append(mutant_job(module, mutation, covers, results))
        else:
            results.add(module, mutation, outcome="survived", by=_UNTESTED)
    print(f"{len(jobs)} mutants to try")
    try:
        work(jobs, trees)
    finally:
        (STATE / "report.md").write_text(report(chosen, results))
    print(f"{STATE / 'report.md'}")


if __name__ == "__main__":
    main()
