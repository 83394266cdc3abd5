"""`disagg demo`: runs a small deployment on this machine's CPU and prints a table.

Serves a generated float32 checkpoint with one prefill and one decode engine, sends prompts from a
few tokens to several thousand, and compares each answer with a single engine's, token for token.
The figures are the deployment's own metrics. Exit status 0 only if all answers are equal and all
caches were handed off.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from disagg.cluster import RunningDeployment, start
from disagg.cluster.serve import Progress
from disagg.preflight import checks
from disagg.private_files import user_folder
from disagg.testing.checkpoint import make_model
from disagg.testing.deployment import MODEL, cpu_deployment
from disagg.testing.openai_stream import stream
from disagg.testing.vllm_server import VllmServer, completion, token_ids

LENGTHS = (5, 100, 128, 129, 1000, 4000, 8000)
TOKENS = 24
_QUESTION = "Why are prompts read in one place and answers written in another?"


@dataclass(frozen=True)
class DemoRow:
    """The figures of one prompt. Times in seconds."""

    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    moved_bytes: float
    moved_s: float
    transport: str
    equal: bool


def run() -> int:
    """Run the demo. Returns the exit status."""
    console = Console(soft_wrap=True, highlight=False)
    table_console = Console(width=max(console.width, 96), highlight=False)
    make_model(MODEL)
    deployment = cpu_deployment("demo")
    checks.check(deployment)
    console.print(
        "One prefill and one decode engine in Ray actors, and a single one to compare with."
    )
    progress = Progress(console)
    try:
        with (
            VllmServer("the single engine", MODEL.absolute()) as single,
            start(deployment, progress=progress) as running,
        ):
            progress("waiting for the single engine")
            single.wait_ready()
            progress.close()
            rows = _measure(running, single)
            table_console.print(_table(rows))
            _chat(console, running)
    finally:
        progress.close()
    return _verdict(console, rows)


def _measure(running: RunningDeployment, single: VllmServer) -> list[DemoRow]:
    generator = random.Random(0)
    prompts = [[generator.randrange(300, 1000) for _ in range(n)] for n in LENGTHS]
    prompts.append([*prompts[-1], *(generator.randrange(300, 1000) for _ in range(200))])
    return [_row(running.url, single, prompt) for prompt in prompts]


def _row(url: str, single: VllmServer, prompt: Sequence[int]) -> DemoRow:
    before = _handoffs(url)
    tokens, first_token_s, usage = _stream(url, prompt)
    moved = _handoffs(url).since(before)
    return DemoRow(
        len(prompt),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        first_token_s,
        sum(moved.bytes_by_transport.values()),
        moved.seconds,
        ", ".join(moved.bytes_by_transport) or "none",
        [tokens] == token_ids(single.complete(list(prompt), max_tokens=TOKENS)),
    )


def _stream(url: str, prompt: Sequence[int]) -> tuple[list[int], float, dict[str, Any]]:
    """Token ids, seconds to the first of them, and usage."""
    began = time.monotonic()
    tokens: list[int] = []
    first, usage = 0.0, dict[str, Any]()
    body = completion(list(prompt), max_tokens=TOKENS, stream=True)
    body |= {"model": "tiny", "stream_options": {"include_usage": True}}
    for event in stream(f"{url}/v1/completions", body):
        if event.get("choices"):
            first = first or time.monotonic() - began
            tokens += event["choices"][0].get("token_ids") or []
        usage = event.get("usage") or usage
    return tokens, first, usage


@dataclass(frozen=True)
class Handoffs:
    """Totals of all decode engines so far."""

    seconds: float
    bytes_by_transport: dict[str, float]

    def since(self, before: Handoffs) -> Handoffs:
        """The difference to `before`."""
        moved = {
            transport: count - before.bytes_by_transport.get(transport, 0.0)
            for transport, count in self.bytes_by_transport.items()
        }
        return Handoffs(
            self.seconds - before.seconds, {name: count for name, count in moved.items() if count}
        )


def _handoffs(url: str) -> Handoffs:
    """The totals in the router's /metrics, of this moment: read at the operators' socket."""
    seconds, by_transport = 0.0, dict[str, float]()
    path = user_folder().path / f"router-{url.rpartition(':')[2]}.sock"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=10) as operator:
        text = operator.get("http://localhost/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("role") != "decode":
                continue
            if sample.name == "disagg_handoff_seconds_sum":
                seconds += sample.value
            elif sample.name == "disagg_handoff_bytes_total":
                transport = sample.labels["transport"]
                by_transport[transport] = by_transport.get(transport, 0.0) + sample.value
    return Handoffs(seconds, by_transport)


def _table(rows: Sequence[DemoRow]) -> Table:
    table = Table(title="Prefill on one engine, decode on another (float32, CPU)")
    for column in ("prompt tokens", "cached", "first token", "moved", "transport", "GB/s", "equal"):
        table.add_column(column, justify="right")
    for row in rows:
        speed = f"{row.moved_bytes / row.moved_s / 1e9:.2f}" if row.moved_s else "-"
        table.add_row(
            f"{row.prompt_tokens:,}",
            f"{row.cached_tokens:,}",
            f"{row.first_token_s * 1000:.0f} ms",
            f"{row.moved_bytes / 1e6:.1f} MB",
            row.transport,
            speed,
            "yes" if row.equal else "[bold red]NO[/]",
        )
    return table


def _chat(console: Console, running: RunningDeployment) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{running.url}/v1", api_key="none")
    console.print(f"\n[bold]user[/]       {_QUESTION}\n[bold]assistant[/]  ", end="")
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": _QUESTION}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    for chunk in answer:
        if chunk.choices and chunk.choices[0].delta.content:
            console.out(chunk.choices[0].delta.content, end="")
    console.print("\n[dim](random weights: it speaks, it does not think)[/]\n")


def _verdict(console: Console, rows: Sequence[DemoRow]) -> int:
    wrong = [row.prompt_tokens for row in rows if not row.equal]
    if wrong:
        console.print(f"[bold red]Different from a single engine[/] at {wrong} tokens.")
        return 1
    if not all(row.moved_bytes for row in rows):
        console.print("[bold red]Some caches did not move[/]; the answers are right all the same.")
        return 1
    console.print(f"All {len(rows)} answers equal a single engine's, token for token.")
    return 0
