"""`disagg bench heal`: kills engines and the router under load, and watches them come back.

Two prefill and two decode engines answer clients that never stop, every answer is compared with a
single engine's, and one process after the other gets a SIGKILL. With two of each role nobody may
notice, but for the router's own death, which ends what it was relaying.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from disagg import checks
from disagg.bench.demo import MODEL, cpu_deployment
from disagg.bench.vllm_server import VllmServer, completion
from disagg.checkpoint import make_model
from disagg.cluster import RunningDeployment, start
from disagg.cluster.serve import Progress
from disagg.config import Deployment, ResourcesSection

VICTIMS = ("worker of prefill-0", "core of decode-0", "actor of prefill-1", "actor of decode-1")
ROUTER = "router"
BACK_S = 240.0
_LOOK_S, _SETTLE_S = 0.1, 5.0
_BLOCKS = 512


@dataclass
class Load:
    """Clients that ask and compare, until `over`."""

    url: str
    single: VllmServer
    over: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def client(self, seed: int) -> None:
        """One of them."""
        generator = random.Random(seed)
        while not self.over.is_set():
            length = generator.choice([20, 130, 400, 900])
            prompt = [generator.randrange(300, 1000) for _ in range(length)]
            # A stream whose client asks for token ids is not moved to another engine.
            asked = completion(prompt, max_tokens=24, return_token_ids=False)
            body = {"model": "tiny", **asked}
            try:
                text = self._streamed(body) if generator.random() < 0.5 else self._whole(body)
            except (httpx.HTTPError, ValueError) as error:
                self.counts["error"] += 1
                self.errors.append(f"{type(error).__name__}: {str(error)[:200]}")
                time.sleep(0.2)
                continue
            right = self.single.complete(prompt, max_tokens=24)["choices"][0]["text"]
            self.counts["right" if text == right else "wrong"] += 1

    def _whole(self, body: dict[str, Any]) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code}: {answer.text}")
        text: str = answer.json()["choices"][0]["text"]
        return text

    def _streamed(self, body: dict[str, Any]) -> str:
        text, done = "", False
        asked = {**body, "stream": True}
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=asked, timeout=120) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        raise ValueError(data)
                    text += event["choices"][0]["text"]
        if not done:
            raise ValueError("the stream was cut")
        return text


@dataclass(frozen=True)
class Row:
    """One death. Seconds from the SIGKILL; `own_start_s`: of the engine that came back."""

    victim: str
    out_s: float
    whole_s: float
    own_start_s: float
    answers: int
    errors: int


def run(clients: int, rounds: int) -> int:
    """Run it. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    make_model(MODEL)
    deployment = _deployment()
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
        load = Load(running.url, single)
        threads = [threading.Thread(target=load.client, args=(n,)) for n in range(clients)]
        for thread in threads:
            thread.start()
        try:
            rows = [
                _death(console, running, load, victim) for victim in (*(VICTIMS * rounds), ROUTER)
            ]
        finally:
            load.over.set()
            for thread in threads:
                thread.join()
    Console(width=max(console.width, 100), highlight=False).print(_table(rows))
    console.print(f"answers: {dict(load.counts)}")
    for error in load.errors[:20]:
        console.print(f"  {error}", markup=False)
    unnoticed = all(row.answers and not row.errors for row in rows if row.victim != ROUTER)
    return 0 if unnoticed and not load.counts["wrong"] else 1


def _deployment() -> Deployment:
    plain = cpu_deployment("heal")
    # Four engines are more than the cores of a small machine; they take turns.
    two = {"replicas": 2, "resources": ResourcesSection(num_cpus=0)}
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


def _death(console: Console, running: RunningDeployment, load: Load, victim: str) -> Row:
    _heal_until(running, _clock(_SETTLE_S))
    before = Counter(load.counts)
    console.print(f"kill -9: {victim}")
    name = victim.rpartition(" ")[2]
    target = _process(running, victim)
    began = time.monotonic()
    target.kill()
    if victim == ROUTER:
        out_s = _heal_until(running, lambda: _state(running) is None)
        _heal_until(running, lambda: _state(running) is not None)
        whole_s = time.monotonic() - began
        own_start_s = 0.0
    else:
        _heal_until(running, lambda: not _is_up(running, name))
        out_s = time.monotonic() - began
        _heal_until(running, lambda: _is_up(running, name))
        whole_s = time.monotonic() - began
        own_start_s = next(e.startup_s for e in running.engines if e.name == name)
    _heal_until(running, _clock(_SETTLE_S))
    since = load.counts - before
    answers = since["right"] + since["wrong"]
    return Row(victim, out_s, whole_s, own_start_s, answers, since["error"])


def _process(running: RunningDeployment, victim: str) -> psutil.Process:
    if victim == ROUTER:
        port = int(running.url.rpartition(":")[2])
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return psutil.Process(next(c.pid for c in listening if c.laddr and c.laddr.port == port))
    what, _, name = victim.partition(" of ")
    actor = psutil.Process(next(e.pid for e in running.engines if e.name == name))
    if what == "actor":
        return actor
    core = _spawned(actor)
    return core if what == "core" else _spawned(core)


def _spawned(parent: psutil.Process) -> psutil.Process:
    """vLLM's child; its other one is Python's resource tracker."""
    children = [(child, " ".join(child.cmdline())) for child in parent.children()]
    return next(child for child, line in children if "resource_tracker" not in line)


def _heal_until(running: RunningDeployment, condition: Callable[[], bool]) -> float:
    """Seconds that it took; RuntimeError if the deployment cannot go on, or it takes too long."""
    began = time.monotonic()
    while not condition():
        problem = running.look_after(_LOOK_S)
        if problem is not None or time.monotonic() - began > BACK_S:
            raise RuntimeError(problem or f"not as it should be after {BACK_S:g} s")
    return time.monotonic() - began


def _clock(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def _state(running: RunningDeployment) -> dict[str, str] | None:
    try:
        answer = httpx.get(f"{running.url}/ready", timeout=5)
        engines: dict[str, str] = answer.json()["engines"]
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return engines


def _is_up(running: RunningDeployment, name: str) -> bool:
    state = _state(running)
    return state is not None and state.get(name) == "up"


def _table(rows: Sequence[Row]) -> Table:
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
