"""`disagg engines`: list, add and remove the engines of a running router."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from disagg.config import Role
from disagg.errors import ConfigError, DisaggError
from disagg.router.operator_client import OperatorClient
from disagg.router.server.engines_api import PATH

POLL_S = 0.2


def show(client: OperatorClient, *, as_json: bool) -> int:
    """Print the engines. Returns 0; raises DisaggError."""
    with client:
        engines = _listed(client)
    if as_json:
        print(json.dumps(engines, indent=2))
        return 0
    table = Table(header_style="dim")
    for column in ("engine", "state", "in flight", "URL", "from"):
        table.add_column(column, justify="right" if column == "in flight" else "left")
    for one in engines:
        sources = escape(", ".join(one["sources"]) or "-")
        table.add_row(one["name"], one["state"], _count(one), escape(one["url"]), sources)
    Console(highlight=False, soft_wrap=True).print(table)
    return 0


def add(client: OperatorClient, prefill: Sequence[str], decode: Sequence[str]) -> int:
    """Add engines by URL. Returns 0; raises DisaggError at the first that is refused."""
    pairs: list[tuple[Role, str]] = [
        *(("prefill", url) for url in prefill),
        *(("decode", url) for url in decode),
    ]
    if not pairs:
        raise ConfigError("--prefill, --decode: none given; name the URL of an engine")
    with client:
        for role, url in pairs:
            engine = _ask(client, "POST", PATH, {"role": role, "url": url})
            print(f"{engine['name']} {engine['state']}: {engine['url']}")
    return 0


def remove(client: OperatorClient, names: Sequence[str], *, wait: bool, timeout_s: float) -> int:
    """Let engines drain; with `wait`, until they are gone. Returns 0; raises DisaggError."""
    with client:
        for name in names:
            engine = _ask(client, "DELETE", f"{PATH}/{quote(name, safe='')}")
            print(f"{name} {engine['state']}, {_count(engine)} in flight", flush=True)
        deadline = time.monotonic() + timeout_s
        while wait and (left := [one for one in _listed(client) if _goes(one, names)]):
            if time.monotonic() > deadline:
                shown = ", ".join(f"{one['name']} ({_count(one)} in flight)" for one in left)
                raise DisaggError(f"not gone in {timeout_s:g} s: {shown}")
            time.sleep(POLL_S)
        if wait:
            print("gone")
    return 0


def _count(engine: dict[str, Any]) -> str:
    """Of its requests; unknown if not all processes of the router answer."""
    return "?" if engine["in_flight"] is None else str(engine["in_flight"])


def _goes(engine: dict[str, Any], names: Sequence[str]) -> bool:
    return engine["name"] in names and engine["state"] != "serves"


def _listed(client: OperatorClient) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = _ask(client, "GET", PATH)["engines"]
    return engines


def _ask(client: OperatorClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    try:
        return client.ask(method, path, body)
    except (OSError, HTTPException) as error:
        raise client.unreached(error) from error
