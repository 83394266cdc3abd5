"""`disagg bench scale`: scales the pools and replaces all engines under load.

`disagg serve`, `disagg scale` and `disagg apply` run as a user runs them, in processes of their
own. Clients send requests all the time and compare each answer with a single engine's. No client
may see an error or a wrong token. With `--waves` the clients come and go, and the decode pool's
autoscaler must follow with one change per edge.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from disagg.bench.results import Output, target
from disagg.bench.results import Row as ResultRow
from disagg.bench.results import Table as ResultTable
from disagg.chaos.steady_load import SteadyLoad
from disagg.errors import DisaggError
from disagg.tables import show as show_table
from disagg.testing.checkpoint import make_model
from disagg.testing.deployment import MODEL
from disagg.testing.ports import free_port
from disagg.testing.vllm_server import VllmServer

START_S, COMMAND_S, STOP_S = 300.0, 600.0, 30.0
_SETTLE_S = 5.0
_BLOCKS, _OTHER_BLOCKS = 512, 448
_FOLLOWING = {"max_replicas": 2, "target_queue": 1, "cooldown_s": 30}
_LONG = 200  # tokens of an answer, so that the autoscaler sees the load
_LOG = "serve.log"
_NAME = f"bench-scale-{os.getpid()}"
_DISAGG = [sys.executable, "-m", "disagg.cli"]


@dataclass(frozen=True)
class ScaleRow:
    """One command under load. `seconds`: from its start to its end."""

    command: str
    seconds: float
    answers: int
    errors: int


def run(clients: int, output: Output) -> int:
    """Run it. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    with _scene(console) as (folder, port, single):
        changed = folder / "b.yaml"
        changed.write_text(yaml.safe_dump(_deployment(port, _OTHER_BLOCKS)))
        load = SteadyLoad(f"http://127.0.0.1:{port}", single)
        with load.clients(clients):
            rows = [
                _command(console, load, ["scale", "--name", _NAME, "prefill=2", "decode=2"]),
                _command(console, load, ["scale", "--name", _NAME, "prefill=1", "decode=1"]),
                _command(console, load, ["apply", str(changed)]),
            ]
    show_table(_table(rows))
    load.report(console)
    unnoticed = all(row.answers and not row.errors for row in rows)
    shown: list[ResultRow] = [
        {
            "command": f"disagg {row.command}",
            "done after, s": round(row.seconds),
            "answers meanwhile": row.answers,
            "errors": row.errors,
        }
        for row in rows
    ]
    output.write(
        "scale",
        {"commands": [asdict(row) for row in rows], "answers": dict(load.counts)},
        [ResultTable(f"Commands under the load of {clients} clients", shown)],
        [
            target("wrong answers", load.counts["wrong"], at_most=0),
            target("errors", load.counts["error"], at_most=0),
        ],
    )
    return 0 if unnoticed and not load.counts["wrong"] else 1


def run_waves(clients: int, waves: int, half_s: float, output: Output) -> int:
    """`waves` times: `clients` for `half_s`, then none for `half_s`. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    with _scene(console, _FOLLOWING) as (folder, port, single):
        load = SteadyLoad(f"http://127.0.0.1:{port}", single, tokens=_LONG)
        log = folder / _LOG
        changes = [_half(console, load, log, n, half_s) for n in (clients, 0) * waves]
    load.report(console)
    followed = changes == [["1 -> 2"], ["2 -> 1"]] * waves
    console.print(
        "the autoscaler followed" if followed else f"the autoscaler did not follow: {changes}",
        markup=False,
    )
    edges: list[ResultRow] = [
        {"clients": n, "changes of the decode pool": ", ".join(some) or "none"}
        for n, some in zip((clients, 0) * waves, changes, strict=True)
    ]
    missed = sum(
        found != wanted
        for found, wanted in zip(changes, [["1 -> 2"], ["2 -> 1"]] * waves, strict=True)
    )
    output.write(
        "scale-waves",
        {"changes": changes, "answers": dict(load.counts)},
        [ResultTable(f"The autoscaler, half a wave of {half_s:g} s each", edges)],
        [
            target("edges that the autoscaler did not follow once", missed, at_most=0),
            target("wrong answers", load.counts["wrong"], at_most=0),
            target("errors", load.counts["error"], at_most=0),
        ],
    )
    return 0 if followed and set(load.counts) == {"right"} else 1


@contextmanager
def _scene(console: Console, autoscale: Any = None) -> Iterator[tuple[Path, int, VllmServer]]:
    """A deployment that serves, and a single engine: its folder, the router's port, the engine."""
    make_model(MODEL)
    blocks = ("--num-gpu-blocks-override", str(_BLOCKS))
    with (
        tempfile.TemporaryDirectory(prefix="disagg-") as name,
        VllmServer("the single engine", MODEL.absolute(), args=blocks) as single,
    ):
        folder, port = Path(name), free_port()
        file = folder / "a.yaml"
        file.write_text(yaml.safe_dump(_deployment(port, _BLOCKS, autoscale)))
        with _served(console, file, folder / _LOG):
            single.wait_ready()
            yield folder, port, single


def _half(console: Console, load: SteadyLoad, log: Path, clients: int, seconds: float) -> list[str]:
    """The changes that the autoscaler makes during half a wave."""
    console.print(f"{clients} clients for {seconds:g} s")
    before = len(log.read_text().splitlines())
    with load.clients(clients):
        time.sleep(seconds)
    lines = [line for line in log.read_text().splitlines()[before:] if "autoscaler: " in line]
    for line in lines:
        console.print(f"  {line}", markup=False)
    return [line.partition("autoscaler: decode ")[2].partition(":")[0] for line in lines]


def _deployment(port: int, blocks: int, autoscale: Any = None) -> dict[str, Any]:
    # There may be more engines than cores: they take turns.
    pool = {"replicas": 1, "resources": {"num_cpus": 0}}
    return {
        "name": _NAME,
        "model": {"path": str(MODEL.absolute()), "served_name": "tiny"},
        "engine": {
            "args": {
                "dtype": "float32",
                "block_size": 128,
                "max_model_len": 16384,
                "num_gpu_blocks_override": blocks,
            }
        },
        "prefill": pool,
        "decode": {**pool, "autoscale": autoscale},
        "router": {"port": port, "access_log": False, "pairing": {"local_prefill_tokens": 0}},
    }


@contextmanager
def _served(console: Console, file: Path, log: Path) -> Iterator[None]:
    """`disagg serve` of this file."""
    console.print("disagg serve: one prefill and one decode engine, and a single one to compare")
    with log.open("wb") as out:
        process = subprocess.Popen([*_DISAGG, "serve", str(file)], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_S
        while "Ready: " not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise DisaggError(f"disagg serve did not get ready:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(STOP_S)


def _command(console: Console, load: SteadyLoad, words: list[str]) -> ScaleRow:
    time.sleep(_SETTLE_S)
    shown = " ".join(Path(w).name for w in words if w not in ("--name", _NAME))
    console.print(f"disagg {shown}")
    before, began = Counter(load.counts), time.monotonic()
    done = subprocess.run(
        [*_DISAGG, *words], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    seconds = time.monotonic() - began
    for line in done.stdout.splitlines():
        console.print(f"  {line}", markup=False)
    if done.returncode:
        raise DisaggError(f"disagg {shown} failed:\n{done.stderr[-2000:]}")
    time.sleep(_SETTLE_S)
    since = load.counts - before
    return ScaleRow(shown, seconds, since["right"] + since["wrong"], since["error"])


def _table(rows: list[ScaleRow]) -> Table:
    table = Table(title="Commands under load", title_justify="left")
    table.add_column("command")
    for column in ("done after", "answers meanwhile", "errors"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row.command, f"{row.seconds:.0f} s", str(row.answers), str(row.errors))
    return table
