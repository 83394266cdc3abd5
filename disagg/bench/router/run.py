"""`disagg bench router`: the cost of a router: disagg's, vllm-router, other peers, and none.

The engines are fake and compute nothing, so only the routers' own work is measured. Peers that
cannot use these engines bring their own (`peers.py`). Engines and
routers are processes of their own; this process is the load generator. Each round measures every
case and target in random order, so that drift of the machine affects all alike.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from disagg.bench.results import Output
from disagg.bench.router import load as router_load
from disagg.bench.router.fake_engine import CHUNKS
from disagg.bench.router.load import MODEL
from disagg.bench.router.peers import PEERS
from disagg.bench.router.report import (
    DIRECT,
    MODES,
    OURS,
    PEER,
    TARGETS,
    WITH_ALL,
    WITH_ALL_IN_TWO,
    WITH_MIGRATION,
    WITH_TWO_MODELS,
    WITH_TWO_PROCESSES,
    RouterCase,
    Sample,
    Samples,
    rows,
    show,
    tables,
    targets,
)
from disagg.errors import ConfigError, StartupError
from disagg.testing.launch import launch
from disagg.testing.ports import free_port

# Its requests are a client's, from a web page, through a proxy.
_ALL_HEADERS = {
    "authorization": "Bearer of-a-client",
    "origin": "https://chat.example.com",
    "x-forwarded-for": "192.0.2.7",
    "x-forwarded-proto": "https",
}
# So that each client reuses its connection, also when there are many clients.
_LEAST_PER_CLIENT = 4
_WARM_UP_SHARE = 4


@dataclass(frozen=True)
class RouterBenchPlan:
    """What to measure. `requests`: per batch. A batch is one case of one target; each round has it
    once."""

    requests: int
    rounds: int
    clients: Sequence[int]
    modes: Sequence[str]
    targets: Sequence[str]
    pace_ms: float

    def check(self) -> None:
        """Raise `ConfigError` for a plan that cannot be measured."""
        problems = [
            f"{t}: no such target; choose from {', '.join(TARGETS)}"
            for t in self.targets
            if t not in TARGETS
        ]
        problems += [
            f"{m}: no such mode; choose from {', '.join(MODES)}"
            for m in self.modes
            if m not in MODES
        ]
        if not (self.clients and self.modes and self.targets):
            problems.append("clients, modes and targets: name at least one of each")
        if min([*self.clients, self.requests, self.rounds]) < 1 or self.pace_ms < 0:
            problems.append("clients, requests and rounds: must be at least 1; pace: not below 0")
        if problems:
            raise ConfigError(problems)


@dataclass
class _Target:
    """A router, or an engine without one. `process`: the router's. `engines`: those behind it.
    `events`: of one stream. `headers`: of its requests. `resident`: samples in MB."""

    url: str
    process: psutil.Process | None
    engines: Sequence[psutil.Process]
    events: int = CHUNKS
    headers: Mapping[str, str] = field(default_factory=dict)
    resident: list[float] = field(default_factory=list)

    def processes(self) -> list[psutil.Process]:
        return _family(self.process) if self.process else []


def run(plan: RouterBenchPlan, output: Output) -> int:
    """Measure and print. Returns the exit status."""
    plan.check()
    console = Console(highlight=False, soft_wrap=True)
    began = time.monotonic()
    with ExitStack() as stack:
        urls, engines = {}, []
        for role in ("prefill", "decode"):
            urls[role], process = launch(stack, f"fake {role}", _engine(role, plan.pace_ms))
            engines.append(process)
        routers = _start(stack, plan, urls, engines, console)
        samples = _measure(plan, routers, console)
        memory = {
            name: {"processes": len(t.processes()), "start": t.resident[0], "most": max(t.resident)}
            for name, t in routers.items()
            if t.process
        }
    report = {
        "pace_ms": plan.pace_ms,
        "rounds": plan.rounds,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "memory_mb": memory,
        "peers": {name: PEERS[name].versions() for name in routers if name in PEERS},
        "rows": rows(samples),
    }
    show(report, console)
    output.write("router", report, tables(report), targets(report))
    return 0


# ---- processes -----------------------------------------------------------------------------


def _start(
    stack: ExitStack,
    plan: RouterBenchPlan,
    urls: dict[str, str],
    engines: Sequence[psutil.Process],
    console: Console,
) -> dict[str, _Target]:
    """The targets of a plan that start here. disagg's own router must."""
    targets = {}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in plan.targets:
        if name == DIRECT:
            targets[name] = _Target(urls["decode"], None, engines)
            continue
        try:
            if name in PEERS:
                peer = PEERS[name].launch(stack, folder)
                target = _Target(peer.url, peer.router, peer.engines, PEERS[name].events)
            elif name in (WITH_ALL, WITH_ALL_IN_TWO):
                url, process = _all_on(stack, name, urls, folder)
                target = _Target(url, process, engines, headers=_ALL_HEADERS)
            else:
                url, process = launch(stack, name, _router(name, urls, folder))
                target = _Target(url, process, engines)
        except (StartupError, OSError) as error:
            if name not in (PEER, *PEERS):
                raise
            console.print(f"{name}: left out: {error}", markup=False)
            continue
        target.resident.append(_resident(target.processes()))
        targets[name] = target
    return targets


def _router(name: str, urls: dict[str, str], folder: Path) -> list[str]:
    """The command of a target. `folder`: for its files."""
    legs = ["--prefill", urls["prefill"], "--decode", urls["decode"]]
    where = ["--host", "127.0.0.1", "--port", "{port}"]
    alone = [sys.executable, "-m", "disagg.cli", "router", *where]
    if name == WITH_TWO_MODELS:
        config = folder / "two-models.json"
        config.write_text(json.dumps(_two_models(urls)))
        return [*alone, "--config", str(config)]
    ours = [*alone, *legs]
    if name == WITH_TWO_PROCESSES:
        return [*ours, "--processes", "2"]
    if name == WITH_MIGRATION:
        # The same engine under a second name: streams can move there, at no cost for the machine.
        return [*ours, "--decode", urls["decode"]]
    if name == OURS:
        return ours
    beside = str(Path(sys.executable).parent)
    binary = shutil.which(PEER, path=beside) or shutil.which(PEER) or PEER
    settings = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--log-level", "warning"]
    return [binary, *where, *legs, *settings, "--prometheus-port", str(free_port())]


def _two_models(urls: Mapping[str, str]) -> dict[str, Any]:
    """The same engines for both: a model more costs its choice, and nothing for the machine."""
    engines = {role: [url] for role, url in urls.items()}
    return {"models": [{"name": model, "engines": engines} for model in (MODEL, "other")]}


def _all_on(
    stack: ExitStack, name: str, urls: Mapping[str, str], folder: Path
) -> tuple[str, psutil.Process]:
    """A router with all that it can be asked for: two models, keys, shares and rates, CORS, a
    trusted proxy, comments in silent streams, a root path; and another router as its peer."""
    folder = folder / name
    folder.mkdir()
    for file, key in (("clients", "client=of-a-client"), ("operators", "operator=of-an-operator")):
        (folder / file).touch(mode=0o600)
        (folder / file).write_text(key)
    many = 1 << 40
    settings = {
        **_two_models(urls),
        "api_keys_file": str(folder / "clients"),
        "admin_keys_file": str(folder / "operators"),
        "shares": {
            "client": {
                "weight": 2,
                "requests_per_minute": many,
                "prompt_tokens_per_minute": many,
                "output_tokens_per_minute": many,
            }
        },
        "cors": {"allowed_origins": [_ALL_HEADERS["origin"]]},
        "proxies": {"networks": ["127.0.0.0/8"]},
        "stream_keep_alive_s": 15,
        "root_path": "/llm",
    }
    command = [sys.executable, "-m", "disagg.cli", "router", "--host", "127.0.0.1"]

    def start(what: str, **more: Any) -> tuple[str, psutil.Process]:
        config = folder / f"{what}.json"
        config.write_text(json.dumps(settings | more))
        return launch(stack, what, [*command, "--port", "{port}", "--config", str(config)])

    peer, _ = start("peer")
    return start(name, peers=[peer], processes=2 if name == WITH_ALL_IN_TWO else 1)


def _engine(role: str, pace_ms: float) -> list[str]:
    return [sys.executable, "-m", "disagg.bench.router.fake_engine", role, "{port}", str(pace_ms)]


# ---- measuring -----------------------------------------------------------------------------


def _measure(
    plan: RouterBenchPlan,
    targets: dict[str, _Target],
    console: Console,
) -> Samples:
    """A peer that answers wrong, or not in time, is taken out of the targets and the samples."""
    samples: Samples = defaultdict(list)
    generator = random.Random(1)
    cases = [RouterCase(mode, clients) for mode in plan.modes for clients in plan.clients]
    for number in range(plan.rounds + 1):
        began = time.monotonic()
        for case in generator.sample(cases, len(cases)):
            for name in generator.sample(list(targets), len(targets)):
                # The first round warms connections and caches.
                requests = plan.requests if number else plan.requests // _WARM_UP_SHARE
                try:
                    sample = _batch(case, name, targets[name], requests)
                except (RuntimeError, OSError) as error:
                    if name not in (PEER, *PEERS):
                        raise
                    console.print(f"{name}: left out from here on: {error}", markup=False)
                    del targets[name]
                    for one in cases:
                        samples.pop((one, name), None)
                    continue
                if number:
                    samples[case, name].append(sample)
        done = f"round {number} of {plan.rounds}" if number else "warmed up"
        console.print(f"{done}, {time.monotonic() - began:.0f} s")
    return samples


def _batch(case: RouterCase, name: str, target: _Target, requests: int) -> Sample:
    load = router_load.RouterLoad(
        target.url,
        case.clients,
        max(requests, _LEAST_PER_CLIENT * case.clients),
        case.mode == "stream",
        as_decode=name == DIRECT,
        events=target.events,
        headers=target.headers,
    )
    routers = target.processes()
    before = _cpu(routers), _cpu(target.engines)
    batch = router_load.run(load)
    sample = Sample(
        requests=len(batch.whole),
        wall=batch.wall,
        first_p50=statistics.median(batch.first),
        first_p99=_p99(batch.first),
        whole_p50=statistics.median(batch.whole),
        whole_p99=_p99(batch.whole),
        cpu_router=_cpu(routers) - before[0],
        cpu_fakes=_cpu(target.engines) - before[1],
        cpu_load=batch.cpu,
    )
    if routers:
        target.resident.append(_resident(routers))
    return sample


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _cpu(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


def _resident(processes: Sequence[psutil.Process]) -> float:
    """MB; pages that processes share count in each of them."""
    return round(sum(process.memory_info().rss for process in processes) / 1e6, 1)
