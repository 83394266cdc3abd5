"""`disagg demo`: a conversation with a small model, its document read on one engine and answered on
another, on this machine's CPU.

Each answer is compared with a single engine's, token for token. The figures are the deployment's
own metrics. Exit status 0 only if all answers are equal and all caches were handed off.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from disagg.cluster import RunningDeployment, start
from disagg.cluster.serve import Progress
from disagg.models.catalogue import SMOLLM2
from disagg.models.get import get_model
from disagg.preflight import checks
from disagg.private_files import user_folder
from disagg.tables import show as show_table
from disagg.testing.checkpoint import make_model
from disagg.testing.deployment import MODEL, cpu_deployment
from disagg.testing.openai_stream import stream
from disagg.testing.vllm_server import VllmServer, completion

_DOCUMENT = "demo_document.txt"
_QUESTIONS = (
    "Where did the new lens come from?",
    "How many keepers did the lighthouse have?",
    "What did the queen of the Netherlands send?",
)
_GREETING = "What is the capital of France?"
_MOST_TOKENS, _CONTEXT = 48, 8192
# Prompts of random tokens, for the model with random weights; then the longest one with 200 more.
_LENGTHS, _TOKENS = (5, 100, 128, 129, 1000, 4000, 8000), 24


@dataclass(frozen=True)
class _Prompt:
    """path: of the API. said: to show; empty if it is no conversation."""

    title: str
    path: str
    body: dict[str, Any]
    said: str = ""


@dataclass
class _Answer:
    """Times in seconds."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_token_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DemoRow:
    """The figures of one prompt. Times in seconds."""

    title: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    moved_bytes: float
    moved_s: float
    transport: str
    equal: bool


def run(*, tiny: bool = False) -> int:
    """Run the demo. `tiny`: with random weights, which need no download. Returns the exit
    status."""
    began = time.monotonic()
    console = Console(soft_wrap=True, highlight=False)
    model = _random_model() if tiny else get_model(SMOLLM2.name, None, console)
    limit = 16384 if tiny else _CONTEXT
    deployment = cpu_deployment("demo", model, limit)
    checks.check(deployment)
    console.print(
        "One prefill and one decode engine in Ray actors, and a single one to compare with."
    )
    progress = Progress(console)
    try:
        with (
            VllmServer(
                "the single engine", model.absolute(), args=["--max-model-len", str(limit)]
            ) as single,
            start(deployment, progress=progress) as running,
        ):
            progress("waiting for the single engine")
            single.wait_ready()
            progress.close()
            rows = (_random_prompts if tiny else _conversation)(console, running, single)
    finally:
        progress.close()
    show_table(_table(rows))
    return _verdict(console, rows, time.monotonic() - began)


def _random_model() -> Path:
    make_model(MODEL)
    return MODEL


# ---- what is asked ---------------------------------------------------------------------------


def _random_prompts(
    console: Console, running: RunningDeployment, single: VllmServer
) -> list[DemoRow]:
    generator = random.Random(0)
    prompts = [[generator.randrange(300, 1000) for _ in range(n)] for n in _LENGTHS]
    prompts.append([*prompts[-1], *(generator.randrange(300, 1000) for _ in range(200))])
    bodies = [completion(prompt, max_tokens=_TOKENS) for prompt in prompts]
    asked = [_Prompt("random tokens", "/v1/completions", body) for body in bodies]
    return [_row(running.url, single, prompt, lambda _: None)[0] for prompt in asked]


def _conversation(
    console: Console, running: RunningDeployment, single: VllmServer
) -> list[DemoRow]:
    """A greeting; then a document and questions about it, each with all that was said before."""
    document = files("disagg.testing").joinpath(_DOCUMENT).read_text(encoding="utf-8")
    words = len(document.split())
    first, *later = _QUESTIONS
    turns = [
        ("a question", _GREETING, _GREETING),
        (
            "a document",
            f"Read this document.\n\n{document}\n\nAnswer in one sentence: {first}",
            f"(a document of {words} words) {first}",
        ),
        *(("a follow-up", question, question) for question in later),
    ]
    rows, said = list[DemoRow](), list[dict[str, str]]()
    for number, (title, content, shown) in enumerate(turns):
        if number == 1:
            said = []  # the greeting is a conversation of its own
        said.append({"role": "user", "content": content})
        body = {"messages": list(said), "temperature": 0, "max_tokens": _MOST_TOKENS}
        prompt = _Prompt(title, "/v1/chat/completions", body | {"return_token_ids": True}, shown)
        console.print(f"\n[bold]user[/]       {shown}", markup=True)
        console.print("[bold]assistant[/]  ", end="")
        row, answer = _row(running.url, single, prompt, lambda text: console.out(text, end=""))
        console.print()
        said.append({"role": "assistant", "content": answer})
        rows.append(row)
    console.print()
    return rows


def _row(
    url: str, single: VllmServer, prompt: _Prompt, show: Callable[[str], None]
) -> tuple[DemoRow, str]:
    """The figures of one prompt, and the answer's text."""
    before = _handoffs(url)
    answer = _stream(url, prompt, show)
    moved = _handoffs(url).since(before)
    alone = _stream(single.url, prompt, lambda _: None)
    row = DemoRow(
        prompt.title,
        answer.usage.get("prompt_tokens") or 0,
        (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        answer.first_token_s,
        sum(moved.bytes_by_transport.values()),
        moved.seconds,
        ", ".join(moved.bytes_by_transport) or "none",
        bool(answer.tokens) and answer.tokens == alone.tokens,
    )
    return row, answer.text


def _stream(url: str, prompt: _Prompt, show: Callable[[str], None]) -> _Answer:
    began, answer = time.monotonic(), _Answer()
    body = prompt.body | {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for event in stream(f"{url}{prompt.path}", body):
        for choice in event.get("choices") or ():
            tokens = choice.get("token_ids") or []
            if tokens:
                answer.first_token_s = answer.first_token_s or time.monotonic() - began
            answer.tokens += tokens
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            answer.text += text
            show(text)
        answer.usage = event.get("usage") or answer.usage
    return answer


# ---- what it cost ----------------------------------------------------------------------------


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
    table.add_column("prompt")
    for column in ("tokens", "cached", "first token", "moved", "transport", "GB/s", "equal"):
        table.add_column(column, justify="right")
    for row in rows:
        speed = f"{row.moved_bytes / row.moved_s / 1e9:.2f}" if row.moved_s else "-"
        table.add_row(
            row.title,
            f"{row.prompt_tokens:,}",
            f"{row.cached_tokens:,}",
            f"{row.first_token_s * 1000:.0f} ms",
            f"{row.moved_bytes / 1e6:.1f} MB",
            row.transport,
            speed,
            "yes" if row.equal else "[bold red]NO[/]",
        )
    return table


def _verdict(console: Console, rows: Sequence[DemoRow], seconds: float) -> int:
    wrong = [row.prompt_tokens for row in rows if not row.equal]
    if wrong:
        console.print(f"[bold red]Different from a single engine[/] at {wrong} tokens.")
        return 1
    if not all(row.moved_bytes for row in rows):
        console.print("[bold red]Some caches did not move[/]; the answers are right all the same.")
        return 1
    moved = sum(row.moved_bytes for row in rows) / 1e6
    console.print(
        f"All {len(rows)} answers equal a single engine's, token for token; {moved:.0f} MB of KV "
        f"cache moved. {seconds:.0f} s in all."
    )
    return 0
