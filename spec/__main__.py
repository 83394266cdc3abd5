"""`python -m spec`: check the protocol and its mutants; exit with 1 if one verdict is wrong."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from spec.checker import Result
from spec.runs import ACTIONS, RUNS, Run

_ROW = "{:50} {:>9} {:>6} {:>8}  {}"


def main() -> int:
    parser = argparse.ArgumentParser("python -m spec", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="runs whose setup or mutant has this text")
    parser.add_argument("--trace", action="store_true", help="print all counterexamples")
    parser.add_argument("--actions", action="store_true", help="print the actions, and exit")
    parser.add_argument("--processes", type=int, default=2, help="how many to use (default: 2)")
    options = parser.parse_args()
    if options.actions:
        print("\n".join(action_table()))
        return 0
    numbers = [
        number
        for number, run in enumerate(RUNS)
        if options.only is None or options.only in f"{run.setup} {run.mutant}"
    ]
    began = time.perf_counter()
    failed, taken = False, set[str]()
    for run, result in _results(numbers, options.processes):
        if run.mutant == "":
            taken |= result.taken
        failed |= not run.is_right(result)
        _report(run, result, options.trace)
    never = {action.name for action in ACTIONS} - taken
    if never and options.only is None:
        failed = True
        print(f"\nnever taken, so nothing was checked about it: {', '.join(sorted(never))}")
    print(f"\n{len(numbers)} runs in {time.perf_counter() - began:.0f} s:", end=" ")
    print("FAILED" if failed else "the protocol holds, and every mutant is caught")
    return int(failed)


def _results(numbers: Sequence[int], processes: int) -> Iterator[tuple[Run, Result]]:
    with ProcessPoolExecutor(processes) as pool:
        for number, result in zip(numbers, pool.map(_check, numbers), strict=True):
            yield RUNS[number], result


def _check(number: int) -> Result:
    return RUNS[number].start()


_headed = set[bool]()


def _report(run: Run, result: Result, trace: bool) -> None:
    is_mutant = bool(run.mutant)
    if is_mutant not in _headed:
        _headed.add(is_mutant)
        title = "without the rule: the mutant" if is_mutant else "the protocol, in each setup"
        print(
            ("\n" if len(_headed) > 1 else "")
            + _ROW.format(title, "states", "depth", "s", "verdict")
        )
    if not is_mutant:
        verdict = f"BROKEN: {result.problem}" if result.problem else "holds"
    elif run.is_right(result):
        verdict = f"caught: {result.problem}"
    else:
        verdict = f"NOT CAUGHT by {run.breaks!r}, but: {result.problem or 'nothing is broken'}"
    name = run.mutant or run.setup
    print(
        _ROW.format(name, result.states, result.depth, f"{result.seconds:.1f}", verdict), flush=True
    )
    if trace or not run.is_right(result):
        print("\n".join(f"    {line}" for line in result.trace))


def action_table() -> Iterator[str]:
    """The table of `README.md`: actions, and the functions that do them."""
    yield "| action | by | functions |"
    yield "|---|---|---|"
    for action in ACTIONS:
        names = ", ".join(f"`{name.removeprefix('disagg.')}`" for name in action.implements)
        yield f"| {action.name} | {action.by} | {names or 'an event'} |"


if __name__ == "__main__":
    sys.exit(main())
