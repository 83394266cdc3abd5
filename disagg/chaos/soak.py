"""`disagg bench soak`: many requests through a whole deployment, some clients disconnect early.

Every complete answer is compared with that of a single engine, plain vLLM with the decode engines'
arguments: token for token, in float32. With `sabotage`, sockets between the engines are cut and
workers are stopped for longer than a lease, during the whole run. At the end nothing may be held:
no lease, no request in flight, no chunk of a tier.

The deployment without a file computes long prompts in several steps, and decode fetches their
blocks meanwhile.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from disagg import config
from disagg.bench.results import Output, Row, Table, target
from disagg.chaos.sabotage import Saboteur
from disagg.cluster import start
from disagg.cluster.serve import Progress
from disagg.config import Deployment
from disagg.errors import ConfigError
from disagg.preflight import checks
from disagg.testing.checkpoint import make_model
from disagg.testing.deployment import MODEL, cpu_deployment
from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.transport.names import TransportName

QUIET_S = 60.0
# Short, so that leases of stopped workers run out.
LEASE_S, LOAD_DEADLINE_S = 3.0, 5.0
_LENGTHS = (3, 60, 128, 300, 700, 1500)
_STEP_TOKENS = 256
_ANSWER = 16


@dataclass(frozen=True)
class SoakRequest:
    """One request. `patience_s`: the client disconnects then; None: it waits for the answer."""

    prompt: list[int]
    patience_s: float | None


def run(
    requests: int,
    concurrency: int,
    cancel: float,
    *,
    file: Path | None,
    transports: Sequence[TransportName] | None,
    sabotage: bool,
    output: Output,
) -> int:
    """Run it, with the deployment of a file or a small one. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    make_model(MODEL)
    deployment = _deployment(file, transports)
    checks.check(deployment)
    args = deployment.args("decode")
    longest = int(args.get("max_model_len") or max(_LENGTHS) + _ANSWER) - _ANSWER
    saboteur = Saboteur(LEASE_S * 1.3) if sabotage else None
    progress = Progress(console)
    with (
        VllmServer(
            "the single engine",
            Path(deployment.model.path),
            args=as_options(args),
            env=deployment.engine.env,
        ) as single,
        start(deployment, progress=progress) as running,
    ):
        single.wait_ready()
        progress.close()
        if saboteur is not None:
            saboteur.start()
        asked = plans(requests, cancel, longest)
        name = deployment.model.served_name or deployment.model.path
        outcomes = load(console, running.url, single, asked, concurrency, name)
        if saboteur is not None:
            saboteur.end()
            console.print(f"sabotage: {dict(saboteur.done)}")
        held = held_after_quiet(running.url)
        metrics = _metrics(running.url)
    for line in metrics:
        console.print(line)
    console.print(f"outcomes: {dict(outcomes)}; held at the end: {held or 'nothing'}")
    done = {} if saboteur is None else dict(saboteur.done)
    output.write(
        "soak",
        {"outcomes": dict(outcomes), "sabotage": done, "held": held, "metrics": metrics},
        [Table(f"{requests:,} requests, {concurrency} at once", _rows(outcomes, done, metrics))],
        [
            target("wrong answers", outcomes["wrong"], at_most=0),
            target("errors", outcomes["error"], at_most=0),
            target("leases, requests and chunks held at the end", len(held), at_most=0),
        ],
    )
    return 0 if not held and not outcomes["wrong"] and not outcomes["error"] else 1


def _rows(
    outcomes: Mapping[str, int], done: Mapping[str, int], metrics: Sequence[str]
) -> list[Row]:
    """Counts: of answers, of sabotage, and of the engines' metrics that are not zero."""
    rows: list[Row] = [{"counted": f"answers: {k}", "count": n} for k, n in outcomes.items()]
    rows += [{"counted": f"sabotage: {name}", "count": n} for name, n in done.items()]
    for line in metrics:
        name, _, value = line.rpartition(" ")
        if float(value):
            rows.append({"counted": f"`{name}`", "count": float(value)})
    return rows


def _deployment(file: Path | None, transports: Sequence[TransportName] | None) -> Deployment:
    """The deployment with short leases, which decode follows. Raises `ConfigError`."""
    if file is None:
        deployment = cpu_deployment("soak")
        deployment.engine.args["max_num_batched_tokens"] = _STEP_TOKENS
    else:
        deployment = config.load(file)
    router = deployment.router
    if router.api_keys_env or router.api_keys_file:
        raise ConfigError("router.api_keys: the soak's clients send no key; remove the keys")
    changed: dict[str, Any] = {"lease_s": LEASE_S, "load_deadline_s": LOAD_DEADLINE_S}
    if transports is not None:
        changed["transports"] = list(transports)
    sections: dict[str, Any] = {"transfer": deployment.transfer.model_copy(update=changed)}
    if router.pairing.follow == "auto":  # which follows nothing on one host
        pairing = router.pairing.model_copy(update={"follow": True})
        sections["router"] = router.model_copy(update={"pairing": pairing})
    return deployment.model_copy(update=sections)


def as_options(args: Mapping[str, Any]) -> list[str]:
    """Engine arguments as options of vLLM's server."""
    options = list[str]()
    for name, value in args.items():
        option = name.replace("_", "-")
        match value:
            case None:
                continue
            case bool():
                options.append(f"--{option}" if value else f"--no-{option}")
            case dict():
                options += [f"--{option}", json.dumps(value)]
            case list():
                options += [f"--{option}", *map(str, value)]
            case _:
                options += [f"--{option}", str(value)]
    return options


def _metrics(url: str) -> list[str]:
    """Lines of the router's `/metrics` about handoffs, leases and tiers."""
    shown = (
        "disagg_handoffs_total",
        "disagg_handoff_bytes_total",
        "disagg_handoff_hidden_bytes_total",
        "disagg_router_followed_total",
        "disagg_kv_load_failures_total",
        "disagg_leases_total",
        "disagg_tier_hits_total",
    )
    lines = client().get(f"{url}/metrics", timeout=10).text.splitlines()
    return [line for line in lines if line.startswith(shown)]


def plans(requests: int, cancel: float, longest: int = max(_LENGTHS)) -> list[SoakRequest]:
    """Prompts of many lengths; a third of them begin as an earlier one does. `cancel`: the share of
    clients that disconnect."""
    generator = random.Random(2)
    made, lengths = list[SoakRequest](), [length for length in _LENGTHS if length <= longest]
    for _ in range(requests):
        length = generator.choice(lengths)
        prompt = [generator.randrange(300, 1000) for _ in range(length)]
        if made and generator.random() < 1 / 3:
            alike = generator.choice(made).prompt[: generator.randrange(length)]
            prompt[: len(alike)] = alike
        leaves = generator.random() < cancel
        made.append(SoakRequest(prompt, generator.choice([0.02, 0.1, 0.4]) if leaves else None))
    return made


def load(
    console: Console,
    url: str,
    single: VllmServer,
    asked: list[SoakRequest],
    concurrency: int,
    model: str = "tiny",
) -> Counter[str]:
    """Send all. Returns the counts of `right`, `wrong`, `error` and `left` (disconnected)."""
    outcomes: Counter[str] = Counter()
    shown = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        for outcome in pool.map(lambda plan: _one(console, url, single, plan, model), asked):
            outcomes[outcome] += 1
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                console.print(f"{outcomes.total()} of {len(asked)}: {dict(outcomes)}")
    return outcomes


def _one(console: Console, url: str, single: VllmServer, plan: SoakRequest, model: str) -> str:
    body = {"model": model, **completion(plan.prompt, max_tokens=_ANSWER)}
    try:
        answer = client().post(f"{url}/v1/completions", json=body, timeout=plan.patience_s or 300)
    except httpx.TimeoutException:
        return "left" if plan.patience_s else "error"
    except httpx.HTTPError:
        return "error"
    if answer.status_code != 200:
        return "error"
    ours: dict[str, Any] = answer.json()
    theirs = single.complete(plan.prompt, max_tokens=_ANSWER)
    if token_ids(ours) == token_ids(theirs):
        return "right"
    console.print(
        f"wrong: {token_ids(ours)} after {len(plan.prompt)} tokens, {ours['usage']}; the single "
        f"engine's answer: {token_ids(theirs)}, {theirs['usage']}"
    )
    return "wrong"


def held_after_quiet(url: str) -> list[str]:
    """Gauges that are not zero after all requests have ended."""
    deadline = time.monotonic() + QUIET_S
    while True:
        lines = client().get(f"{url}/metrics", timeout=10).text.splitlines()
        gauges = (
            "disagg_leases_held{",
            "disagg_router_in_flight{",
            "disagg_tier_in_use_chunks{",
        )
        held = [line for line in lines if line.startswith(gauges) and not line.endswith(" 0.0")]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(1)
