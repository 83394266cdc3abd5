"""`disagg status`: the state that `/ui` shows, as tables or JSON."""

from __future__ import annotations

import json
import time
from http.client import HTTPException
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from disagg.router.operator_client import OperatorClient
from disagg.router.server.status import PATH

_WORDS = frozenset(["state", "decode", "over", "what", "engine", "engines", "id", "history"])


def run(client: OperatorClient, *, as_json: bool) -> int:
    """Print the state. Returns 0 if every engine is up, else 1; raises DisaggError.

    With a key, or at the router's own socket, it has the ids and reasons of failures.
    """
    with client:
        try:
            state = client.ask("GET", PATH)
        except (OSError, HTTPException) as error:
            raise client.unreached(error) from error
    if as_json:
        print(json.dumps(state, indent=2))
    else:
        console = Console(highlight=False)
        for table in (_engines(state), _pairings(state), _handoffs(state), _failures(state)):
            if table.row_count:
                console.print(table)
        console.print(_in_flight(state))
    return 0 if all(engine["state"] == "up" for engine in state["engines"]) else 1


def _engines(state: dict[str, Any]) -> Table:
    table = titled("Engines", "engine", "state", "running", "waiting", "KV cache", "leases")
    for engine in state["engines"]:
        color = "green" if engine["state"] == "up" else "red"
        usage = engine.get("kv_usage")
        table.add_row(
            engine["name"],
            f"[{color}]{escape(cleaned(engine['state']))}[/]",
            count(engine.get("running")),
            count(engine.get("waiting")),
            "-" if usage is None else f"{usage:.1%}",
            count(engine.get("leases")),
        )
    return table


def _pairings(state: dict[str, Any]) -> Table:
    table = titled("Pairings", "prefill", "decode", "requests")
    for pair in state["router"]["pairings"]:
        table.add_row(pair["prefill"], pair["decode"], count(pair["requests"]))
    return table


def _handoffs(state: dict[str, Any]) -> Table:
    table = titled("Handoffs", "to", "over", "loaded", "failed", "aborted", "MiB", "hidden")
    for engine in state["engines"]:
        for transport, totals in engine.get("handoffs", {}).items():
            counts = (
                count(totals.get(outcome, 0.0)) for outcome in ("loaded", "failed", "aborted")
            )
            size = totals.get("bytes", 0.0)
            hidden = f"{totals.get('hidden_bytes', 0.0) / size:.1%}" if size else "-"
            table.add_row(engine["name"], transport, *counts, f"{size / 2**20:,.1f}", hidden)
    return table


def _failures(state: dict[str, Any]) -> Table:
    table = titled("Recent failures", "when", "status", "what", "engines", "id")
    for failure in state["failures"]:
        engines = " → ".join(filter(None, (failure.get("prefill"), failure.get("decode"))))
        reason = failure.get("why") or f"retried {failure.get('retries', 0)}"
        when = time.strftime("%H:%M:%S", time.localtime(failure["at"]))
        table.add_row(
            when,
            str(failure["status"]),
            escape(cleaned(reason)),
            engines,
            escape(cleaned(failure.get("id", "-"))),
        )
    return table


def _in_flight(state: dict[str, Any]) -> str:
    router = state["router"]
    requests = ", ".join(f"{count(n)} x {status}" for status, n in router["requests"].items())
    local = ", ".join(f"{reason} {count(n)}" for reason, n in router["local"].items())
    first = router["seconds"]["ttft"]
    mean = f"{1000 * first['sum'] / first['count']:.1f} ms" if first["count"] else "-"
    return (
        f"requests: {requests or 'none'}; in flight: {count(router['in_flight']['decode'])}; "
        f"queued: {count(router['queued'])}; mean time to first byte: {mean}\n"
        f"computed by decode: {local or 'none'}{_caches(router)}"
    )


def _caches(router: dict[str, Any]) -> str:
    """What caches spared, and how engines shared them, if the deployment has that."""
    lines, caches, sharing = "", router.get("caches"), router.get("sharing")
    if caches and caches["prompt_tokens"]:
        share = caches["reported_tokens"] / caches["prompt_tokens"]
        lines += (
            f"\nprompt tokens that caches spared prefill: {count(caches['reported_tokens'])} of "
            f"{count(caches['prompt_tokens'])} ({share:.1%})"
        )
    if sharing:
        sources = ", ".join(f"{outcome} {count(n)}" for outcome, n in sharing["sources"].items())
        lines += (
            f"\nfetched from other engines' caches: {count(sharing['tokens'])} tokens; "
            f"engines asked: {sources or 'none'}"
        )
    return lines


def titled(title: str, *columns: str) -> Table:
    """An empty table. Columns of words are on the left."""
    table = Table(title=title, title_justify="left", header_style="dim")
    for number, column in enumerate(columns):
        text = number == 0 or column in _WORDS
        table.add_column(column, justify="left" if text else "right", overflow="fold")
    return table


def count(value: float | None) -> str:
    """A whole number for people."""
    return "-" if value is None else f"{value:,.0f}"


def cleaned(text: str) -> str:
    """Words of engines and clients without characters that a terminal would obey."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
