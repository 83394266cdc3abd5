"""`disagg bench heal`: kills engines, the supervisor and the router under load.

Clients send requests all the time to two prefill and two decode engines; each answer is compared
with a single engine's. One process after another gets a SIGKILL; the supervisor gets it just before
an engine. No client may see an error, except when the router dies, which ends the answers that it
relays. With `--nodes` Ray has several nodes, and one of them is killed as a whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from disagg.bench.results import Output, Target, target
from disagg.bench.results import Row as ResultRow
from disagg.bench.results import Table as ResultTable
from disagg.chaos.steady_load import SteadyLoad
from disagg.cluster import RunningDeployment, start
from disagg.cluster.serve import Progress
from disagg.config import Deployment, ResourcesSection
from disagg.preflight import checks
from disagg.tables import show as show_table
from disagg.testing.checkpoint import make_model
from disagg.testing.deployment import MODEL, cpu_deployment
from disagg.testing.http import client
from disagg.testing.ray_nodes import RayNodes
from disagg.testing.vllm_server import VllmServer

VICTIMS = ("worker of prefill-0", "core of decode-0", "actor of prefill-1", "actor of decode-1")
ROUTER, NODE = "router", "node of prefill-1"
_FIRST = "supervisor, then "
SUPERVISOR = f"{_FIRST}core of prefill-0"
BACK_S = 240.0
_LOOK_S, _SETTLE_S = 0.1, 5.0
_BLOCKS = 512
_AIM_S = 5.0  # until an engine serves again, more than its own start


@dataclass(frozen=True)
class HealRow:
    """One death. Seconds from the SIGKILL. `own_start_s`: start-up time of the new engine."""

    victim: str
    out_s: float
    whole_s: float
    own_start_s: float
    answers: int
    errors: int


def run(clients: int, rounds: int, nodes: int, output: Output) -> int:
    """Run it. Returns the exit status."""
    if nodes < 3:
        return _run(clients, [*(VICTIMS * rounds), SUPERVISOR, ROUTER], None, output)
    # As on larger clusters, the head has no engine. The nodes that are left have room for all.
    with RayNodes(nodes - 1, cpus=4) as cluster:
        return _run(clients, [*(VICTIMS * rounds), SUPERVISOR, NODE, ROUTER], cluster, output)


def _run(clients: int, victims: Sequence[str], cluster: RayNodes | None, output: Output) -> int:
    console = Console(highlight=False, soft_wrap=True)
    make_model(MODEL)
    deployment = _deployment(cpus=0 if cluster is None else 1)
    checks.check(deployment)
    progress = Progress(console)
    blocks = ("--num-gpu-blocks-override", str(_BLOCKS))

    def tell(what: str, _: str) -> None:
        console.print(f"  {what}")

    with (
        VllmServer("the single engine", MODEL.absolute(), args=blocks) as single,
        start(deployment, progress=progress, tell=tell) as running,
    ):
        single.wait_ready()
        progress.close()
        load = SteadyLoad(running.url, single)
        with load.clients(clients):
            rows = [_death(console, running, load, victim, cluster) for victim in victims]
    show_table(_table(rows))
    load.report(console)
    unnoticed = all(row.answers and not row.errors for row in rows if row.victim != ROUTER)
    figures = {"deaths": [asdict(row) for row in rows], "answers": dict(load.counts)}
    title = "Deaths under load; times from the SIGKILL"
    tables = [ResultTable(title, [_shown(row) for row in rows])]
    output.write("heal", figures, tables, _targets(rows, load))
    return 0 if unnoticed and not load.counts["wrong"] else 1


def _deployment(cpus: float) -> Deployment:
    plain = cpu_deployment("heal")
    # Four engines are more than the cores of a small machine; they take turns.
    two = {"replicas": 2, "resources": ResourcesSection(num_cpus=cpus)}
    engine = plain.engine.model_copy(
        update={"args": {**plain.engine.args, "num_gpu_blocks_override": _BLOCKS}}
    )
    return plain.model_copy(
        update={
            "engine": engine,
            "prefill": plain.prefill.model_copy(update=two),
            "decode": plain.decode.model_copy(update=two),
        }
    )


def _death(
    console: Console,
    running: RunningDeployment,
    load: SteadyLoad,
    victim: str,
    cluster: RayNodes | None,
) -> HealRow:
    _heal_until(running, _clock(_SETTLE_S))
    before = Counter(load.counts)
    console.print(f"kill -9: {victim}")
    names = [victim.rpartition(" ")[2]]
    began = time.monotonic()
    if victim == NODE:
        assert cluster is not None
        names = _neighbours(running, names[0])
        cluster.kill_node_of(_pid(running, names[0]))
    else:
        process = _process(running, victim.removeprefix(_FIRST))
        if victim.startswith(_FIRST):
            psutil.Process(running.supervisor_pid).kill()
        process.kill()
    if victim == ROUTER:
        out_s = _heal_until(running, lambda: _state(running) is None)
        _heal_until(running, lambda: _state(running) is not None)
        whole_s = time.monotonic() - began
    else:
        _heal_until(running, lambda: not any(_is_up(running, name) for name in names))
        out_s = time.monotonic() - began
        _heal_until(running, lambda: all(_is_up(running, name) for name in names))
        whole_s = time.monotonic() - began
    _heal_until(running, _clock(_SETTLE_S))
    own_start_s = max((e.startup_s for e in running.engines if e.name in names), default=0.0)
    since = load.counts - before
    answers = since["right"] + since["wrong"]
    shown = victim if len(names) == 1 else f"node of {' and '.join(names)}"
    return HealRow(shown, out_s, whole_s, own_start_s, answers, since["error"])


def _neighbours(running: RunningDeployment, name: str) -> list[str]:
    """The engines on this engine's node, this one first."""
    node_id = next(e.node_id for e in running.engines if e.name == name)
    others = [e.name for e in running.engines if e.node_id == node_id and e.name != name]
    return [name, *others]


def _pid(running: RunningDeployment, name: str) -> int:
    return next(e.pid for e in running.engines if e.name == name)


def _process(running: RunningDeployment, victim: str) -> psutil.Process:
    if victim == ROUTER:
        port = int(running.url.rpartition(":")[2])
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return psutil.Process(next(c.pid for c in listening if c.laddr and c.laddr.port == port))
    what, _, name = victim.partition(" of ")
    actor = psutil.Process(_pid(running, name))
    if what == "actor":
        return actor
    core = _spawned(actor)
    return core if what == "core" else _spawned(core)


def _spawned(parent: psutil.Process) -> psutil.Process:
    """The child process of vLLM; the other child is Python's resource tracker."""
    children = [(child, " ".join(child.cmdline())) for child in parent.children()]
    return next(child for child, line in children if "resource_tracker" not in line)


def _heal_until(running: RunningDeployment, condition: Callable[[], bool]) -> float:
    """Supervise until `condition`; returns the seconds. RuntimeError if it fails or takes long."""
    began = time.monotonic()
    while not condition():
        problem = running.look_after(_LOOK_S)
        if problem is not None or time.monotonic() - began > BACK_S:
            raise RuntimeError(problem or f"not recovered after {BACK_S:g} s")
    return time.monotonic() - began


def _clock(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def _state(running: RunningDeployment) -> dict[str, str] | None:
    try:
        answer = client().get(f"{running.url}/ready", timeout=5)
        engines: dict[str, str] = answer.json()["engines"]
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return engines


def _is_up(running: RunningDeployment, name: str) -> bool:
    state = _state(running)
    return state is not None and state.get(name) == "up"


def _shown(row: HealRow) -> ResultRow:
    shown: ResultRow = {"killed": row.victim, "out of rotation, s": round(row.out_s, 1)}
    shown["serves again, s"] = round(row.whole_s, 1)
    shown["start of the new engine, s"] = round(row.own_start_s, 1) or None
    return shown | {"answers meanwhile": row.answers, "errors": row.errors}


def _targets(rows: Sequence[HealRow], load: SteadyLoad) -> list[Target | None]:
    found = [target("wrong answers", load.counts["wrong"], at_most=0)]
    for row in rows:
        if row.victim != ROUTER:
            found.append(target("errors", row.errors, at=row.victim, at_most=0))
        if row.own_start_s:
            more = round(row.whole_s - row.own_start_s, 1)
            name = "serves again, s more than the engine's own start"
            found.append(target(name, more, at=row.victim, at_most=_AIM_S))
    return found


def _table(rows: Sequence[HealRow]) -> Table:
    table = Table(title="Deaths", title_justify="left")
    table.add_column("killed")
    for column in ("out of rotation", "serves again", "its own start", "answers", "errors"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.victim,
            f"{row.out_s:.1f} s",
            f"{row.whole_s:.1f} s",
            f"{row.own_start_s:.1f} s" if row.own_start_s else "",
            str(row.answers),
            str(row.errors),
        )
    return table
