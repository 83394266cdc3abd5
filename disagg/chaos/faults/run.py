"""`disagg bench faults`: every kind of fault, for every connector that runs here, in one table.

Each cell is written to a file at once. A run that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.bench.results import Output, Target, target
from disagg.bench.results import Row as ResultRow
from disagg.bench.results import Table as ResultTable
from disagg.chaos.faults.connectors import CONNECTORS, Connector
from disagg.chaos.faults.engines import Engines, NotPlayed, Outcome
from disagg.chaos.faults.kinds import KINDS
from disagg.errors import ConfigError, StartupError
from disagg.tables import show as show_table
from disagg.testing.checkpoint import make_model
from disagg.testing.forked_servers import ForkServer
from disagg.vllm_compat.versions import installed as vllm_version

OURS = CONNECTORS[0].name
MODELS = (Path(".cache/models/faults-0"), Path(".cache/models/faults-1"))
STATE = Path(".cache/bench-faults.json")
INTERRUPTED = "interrupted"
_BAD = (Outcome.WRONG, Outcome.HUNG, Outcome.DIED, Outcome.KEPT)
_COLORS = {Outcome.RIGHT: "green"} | dict.fromkeys(_BAD, "red")
_NOT_STREAMED = "not streamed: its decode leg waits for prefill's answer"
Cell = dict[str, Any]
"""{"outcomes": {outcome: count}, "note": why it was not played, or what did not start}."""


def run(
    names: Sequence[str], kinds: Sequence[str], times: int, *, fresh: bool, output: Output
) -> int:
    """Play and print. Returns the exit status: 1 if ours gave a wrong token, hung, died, kept
    blocks, or was not played to the end."""
    console = Console(highlight=False, soft_wrap=True)
    chosen, played = _connectors(names), _kinds(kinds)
    state = State(STATE, fresh=fresh)
    for seed, model in enumerate(MODELS):
        make_model(model, layers=2, hidden=256, kv_heads=2, head_dim=64, seed=seed)
    servers = ForkServer()
    stopped = dict[str, str]()
    try:
        for connector in chosen:
            if reason := _of_connector(connector, played, times, state, servers, console):
                console.print(f"{connector.name}: {reason}")
                stopped[connector.name] = reason
            if reason == INTERRUPTED:
                break
    finally:
        servers.stop()
    cells = {c.name: state.cells_of(c, times) for c in chosen if not c.missing}
    _report(chosen, played, cells, stopped, console, output)
    if OURS not in cells:
        return 0
    ours = [cells[OURS].get(kind) for kind in played]
    return 0 if all(cell and not _bad(cell) for cell in ours) else 1


def _connectors(names: Sequence[str]) -> list[Connector]:
    known = {connector.name.lower(): connector for connector in CONNECTORS}
    for name in names:
        if name.lower() not in known:
            raise ConfigError(f"--connectors: {name} — one of {', '.join(known)}")
    return [known[name.lower()] for name in names] or list(CONNECTORS)


def _kinds(names: Sequence[str]) -> list[str]:
    for name in names:
        if not any(name in kind for kind in KINDS):
            raise ConfigError(f"--only: {name} — a part of one of: {'; '.join(KINDS)}")
    return [kind for kind in KINDS if not names or any(name in kind for name in names)]


def _of_connector(
    connector: Connector,
    kinds: Sequence[str],
    times: int,
    state: State,
    servers: ForkServer,
    console: Console,
) -> str | None:
    """Play the kinds that are left. Returns why not all of them were played, or None."""
    if connector.missing:
        return connector.missing
    mine = state.cells_of(connector, times)
    if connector.follow is None:
        for kind in (kind for kind in kinds if KINDS[kind].streamed):
            mine[kind] = {"outcomes": {}, "note": _NOT_STREAMED}
        kinds = [kind for kind in kinds if not KINDS[kind].streamed]
    left = [kind for kind in kinds if kind not in mine]
    if len(left) < len(kinds):
        console.print(
            f"{connector.name}: {len(kinds) - len(left)} of {len(kinds)} faults are of an earlier "
            "run; --fresh plays them again"
        )
    if not left:
        return None
    console.print(f"{connector.name} ({connector.version}): starting three engines")
    with tempfile.TemporaryDirectory(prefix="disagg-faults-", dir="/dev/shm") as name:
        models = (MODELS[0].absolute(), MODELS[1].absolute())
        engines = Engines(connector, models, Path(name), servers.start)
        try:
            with connector.beside(Path(name)), engines:
                for number, kind in enumerate(left, 1):
                    began = time.monotonic()
                    mine[kind] = play(engines, kind, times)
                    state.save()
                    console.print(
                        f"  {number}/{len(left)} {kind}: {_words(mine[kind])} "
                        f"({time.monotonic() - began:.0f} s)"
                    )
        except StartupError as error:
            return f"does not start: {_cause(error)}"
        except KeyboardInterrupt:  # what was played so far is worth its report
            return INTERRUPTED
    return None


def _cause(error: StartupError) -> str:
    """The last error in the log."""
    errors = [line for line in error.log_tail.splitlines() if "Error: " in line]
    return errors[-1] if errors else str(error)


def play(engines: Engines, kind: str, times: int) -> Cell:
    """Play one kind. Afterwards the engines serve again; raises `StartupError` if they do not. An
    engine that the kind did not kill, and that does not serve, has died. If an answer hung, or an
    engine kept blocks, the next kind begins with new ones, so that each one is counted by itself.
    """
    chosen, note = KINDS[kind], ""
    engines.compute_in_steps(chosen.streamed)
    engines.meet()
    try:
        outcomes = Counter(chosen.play(engines, times))
    except NotPlayed as reason:
        return {"outcomes": {}, "note": str(reason)}
    except StartupError as error:
        outcomes, note = Counter({Outcome.DIED: 1}), f"an engine did not start again: {error}"
    revived = set(engines.revive())
    died = revived - chosen.kills
    if died:
        outcomes[Outcome.DIED] += len(died)
    kept = set(engines.kept())
    if kept:
        outcomes[Outcome.KEPT] += len(kept)
    if outcomes[Outcome.HUNG]:  # what hung may hold blocks for ever
        kept = {"left", "right"}
    for name in kept - revived:
        engines.restart(name)
    return {"outcomes": {str(outcome): count for outcome, count in outcomes.items()}, "note": note}


class State:
    """The cells that were played so far, in a file. Those of other versions are not used."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self._path = path
        self._all: dict[str, dict[str, Any]] = {}
        # Once: who edits it during a run must not lose what was played.
        self._source = f"source of {_changed_at():.0f}"
        if not fresh and path.is_file():
            self._all = json.loads(path.read_text())

    def cells_of(self, connector: Connector, times: int) -> dict[str, Cell]:
        """This connector's, by the kind's name. Add to them, and then `save`."""
        made_with = f"{connector.version}, vLLM {vllm_version()}, {times} times"
        if connector.name == OURS:
            made_with += f", {self._source}"
        known = self._all.setdefault(connector.name, {"made_with": made_with, "cells": {}})
        if known["made_with"] != made_with:
            known.update(made_with=made_with, cells={})
        cells: dict[str, Cell] = known["cells"]
        return cells

    def save(self) -> None:
        """Write the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._all, indent=1))
        new.replace(self._path)


def _changed_at() -> float:
    """When our source changed last, in seconds since the epoch."""
    package = Path(__file__).parents[2]
    return max(file.stat().st_mtime for file in package.rglob("*.py"))


def _bad(cell: Cell) -> int:
    return sum(_count(cell, outcome) for outcome in _BAD)


def _count(cell: Cell, outcome: Outcome) -> int:
    return int(cell["outcomes"].get(str(outcome), 0))


def _words(cell: Cell) -> str:
    counted = [f"{count} {outcome}" for outcome, count in cell["outcomes"].items()]
    return ", ".join(counted) or f"not played: {cell['note']}"


def _report(
    connectors: Sequence[Connector],
    kinds: Sequence[str],
    cells: Mapping[str, Mapping[str, Cell]],
    stopped: Mapping[str, str],
    console: Console,
    output: Output,
) -> None:
    shown = Table(title="Answers to each kind of fault, compared with one plain engine's")
    shown.add_column("fault")
    shown.add_column("connector")
    for outcome in Outcome:
        shown.add_column(str(outcome), justify="right")
    rows: list[ResultRow] = []
    for kind in kinds:
        for number, connector in enumerate(connectors):
            cell = cells.get(connector.name, {}).get(kind)
            if cell is None:
                continue
            figures = [_count(cell, outcome) for outcome in Outcome]
            row: ResultRow = {"fault": kind, "connector": connector.name}
            rows.append(row | {str(o): n for o, n in zip(Outcome, figures, strict=True)})
            if connector.follow is None:  # not looked at
                rows[-1][str(Outcome.KEPT)] = None
            if not cell["outcomes"]:
                rows[-1] = row | dict.fromkeys(map(str, Outcome), None) | {"right": cell["note"]}
            shown.add_row(
                "" if number else kind,
                connector.name,
                *(
                    f"[{_COLORS.get(o, 'default')}]{n}[/]" if n else "·"
                    for o, n in zip(Outcome, figures, strict=True)
                ),
                end_section=number == len(connectors) - 1,
            )
    show_table(shown, keys=2)
    versions = {c.name: c.missing or c.version for c in connectors}
    console.print(", ".join(f"{name}: {said}" for name, said in versions.items()))
    known: list[ResultRow] = [
        {
            "connector": c.name,
            "package": "" if c.missing else c.version,
            "faults played": sum(kind in cells.get(c.name, {}) for kind in kinds),
            "not all, because": stopped.get(c.name),
        }
        for c in connectors
    ]
    targets: list[Target | None] = [
        target(str(o), sum(_count(c, o) for c in cells.get(OURS, {}).values()), at=OURS, at_most=0)
        for o in _BAD
    ]
    if OURS in cells:
        missing = sum(kind not in cells[OURS] for kind in kinds)
        targets.append(target("faults not played", missing, at=OURS, at_most=0))
    output.write(
        "faults",
        {"cells": cells, "versions": versions},
        [
            ResultTable("Connectors", known),
            ResultTable("Answers to each kind of fault", rows),
        ],
        targets,
    )
