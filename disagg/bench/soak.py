"""`disagg bench soak`: many requests through a whole deployment, some of whose clients leave.

Every answer that was waited for is compared with a single engine's. With `sabotage`, sockets
between the engines are cut and workers are stopped for longer than a lease, all the while. At
the end nothing may be held: no lease, no request in flight, no handoff file.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from disagg import checks
from disagg.bench.demo import MODEL, cpu_deployment
from disagg.bench.http import client
from disagg.bench.sabotage import Saboteur
from disagg.bench.vllm_server import VllmServer, completion, token_ids
from disagg.checkpoint import make_model
from disagg.cluster import start
from disagg.cluster.serve import Progress
from disagg.config import Deployment, TransferSection
from disagg.transport.names import TransportName

QUIET_S = 60.0
# Short, so that leases do run out under whoever is stopped.
LEASE_S, LOAD_DEADLINE_S = 3.0, 5.0


@dataclass(frozen=True)
class Plan:
    """One request; `patience_s` is when its client leaves, None for one that waits."""

    prompt: list[int]
    patience_s: float | None


def run(
    requests: int,
    concurrency: int,
    cancel: float,
    *,
    transports: Sequence[TransportName],
    sabotage: bool,
) -> int:
    """Run it. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    make_model(MODEL)
    deployment = _deployment(transports)
    checks.check(deployment)
    saboteur = Saboteur(LEASE_S * 1.3) if sabotage else None
    progress = Progress(console)
    with (
        VllmServer("the single engine", MODEL.absolute()) as single,
        start(deployment, progress=progress) as running,
    ):
        single.wait_ready()
        progress.close()
        if saboteur is not None:
            saboteur.start()
        outcomes = load(console, running.url, single, plans(requests, cancel), concurrency)
        if saboteur is not None:
            saboteur.end()
            console.print(f"sabotage: {dict(saboteur.done)}")
        held = held_after_quiet(running.url)
        _print_metrics(console, running.url)
    console.print(f"outcomes: {dict(outcomes)}; held at the end: {held or 'nothing'}")
    return 0 if not held and not outcomes["wrong"] and not outcomes["error"] else 1


def _deployment(transports: Sequence[TransportName]) -> Deployment:
    transfer = TransferSection(
        transports=list(transports), lease_s=LEASE_S, load_deadline_s=LOAD_DEADLINE_S
    )
    return cpu_deployment("soak").model_copy(update={"transfer": transfer})


def _print_metrics(console: Console, url: str) -> None:
    """How the hand-overs ended, as the engines counted."""
    shown = ("disagg_handoffs_total", "disagg_kv_load_failures_total", "disagg_leases_total")
    for line in client().get(f"{url}/metrics", timeout=10).text.splitlines():
        if line.startswith(shown):
            console.print(line)


def plans(requests: int, cancel: float) -> list[Plan]:
    """Prompts of many lengths; `cancel`: the share of clients that leave."""
    generator = random.Random(2)
    made = []
    for _ in range(requests):
        length = generator.choice([3, 60, 128, 300, 700, 1500])
        prompt = [generator.randrange(300, 1000) for _ in range(length)]
        leaves = generator.random() < cancel
        made.append(Plan(prompt, generator.choice([0.02, 0.1, 0.4]) if leaves else None))
    return made


def load(
    console: Console, url: str, single: VllmServer, asked: list[Plan], concurrency: int
) -> Counter[str]:
    """Send them all. How many were `right`, `wrong`, ended in an `error`, were `left`."""
    outcomes: Counter[str] = Counter()
    shown = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        for outcome in pool.map(lambda plan: _one(url, single, plan), asked):
            outcomes[outcome] += 1
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                console.print(f"{outcomes.total()} of {len(asked)}: {dict(outcomes)}")
    return outcomes


def _one(url: str, single: VllmServer, plan: Plan) -> str:
    body = {"model": "tiny", **completion(plan.prompt)}
    try:
        answer = client().post(f"{url}/v1/completions", json=body, timeout=plan.patience_s or 300)
    except httpx.TimeoutException:
        return "left" if plan.patience_s else "error"
    except httpx.HTTPError:
        return "error"
    if answer.status_code != 200:
        return "error"
    ours: dict[str, Any] = answer.json()
    return "right" if token_ids(ours) == token_ids(single.complete(plan.prompt)) else "wrong"


def held_after_quiet(url: str) -> list[str]:
    """Metric lines that are not zero although all is over."""
    deadline = time.monotonic() + QUIET_S
    while True:
        lines = client().get(f"{url}/metrics", timeout=10).text.splitlines()
        gauges = ("disagg_leases_held{", "disagg_router_in_flight{")
        held = [line for line in lines if line.startswith(gauges) and not line.endswith(" 0.0")]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(1)
