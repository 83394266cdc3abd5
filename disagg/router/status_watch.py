"""`disagg status --watch`: the state and the last ten minutes of a router, again and again.

In a terminal each picture replaces the one before; elsewhere they follow each other. A router that
does not answer for a while is asked on, and the picture says since when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any, NamedTuple, NoReturn

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from disagg.errors import DisaggError
from disagg.router.operator_client import OperatorClient
from disagg.router.server.history import LENGTH_S
from disagg.router.server.status import PATH
from disagg.router.status_client import cleaned, count, titled

WIDTH = 100
_OLD_S = 10.0  # an older value says how old it is
_EVENTS, _GROUPS = 6, 6
_BLOCKS = "▁▂▃▄▅▆▇█"
_LINE = 30  # characters for ten minutes
_GOOD = frozenset(["up", "added"])

Sample = dict[str, Any]


class Watched:
    """What is known of the router: its last state, and the samples of ten minutes."""

    def __init__(self, client: OperatorClient) -> None:
        self._client = client
        self.state: dict[str, Any] = {}
        self.samples: list[Sample] = []
        self.events: list[dict[str, Any]] = []
        self.away_since: float | None = None
        self.why = ""

    def ask(self) -> None:
        """Read what is new. Raises DisaggError, OSError or HTTPException."""
        newest = self.samples[-1]["at"] if self.samples else 0
        state = self._client.ask("GET", f"{PATH}?since={newest}")
        history = state["history"]
        if self.samples and history["began"] > newest:
            self.events.append(
                {"at": history["began"], "engine": "router", "kind": "restarted", "why": ""}
            )
        begin = state["at"] - LENGTH_S
        self.samples = [one for one in self.samples + history["samples"] if one["at"] > begin]
        self.events += [event for event in history["events"] if event not in self.events]
        self.state, self.away_since = state, None

    def ask_on(self) -> None:
        """Like `ask`, but an error is only noted."""
        try:
            self.ask()
        except (OSError, HTTPException, DisaggError) as error:
            self._client.close()  # a new connection next time
            self.away_since = self.away_since or time.time()
            self.why = str(error) or type(error).__name__


def run(client: OperatorClient, every_s: float) -> int:
    """Show it until Ctrl-C, then return 0. Raises DisaggError if the router does not answer the
    first time."""
    console = Console(highlight=False)
    if console.width > WIDTH:
        console.width = WIDTH
    with client:
        watched = Watched(client)
        try:
            watched.ask()
            _show(watched, console, every_s)
        except KeyboardInterrupt:
            return 0
        except (OSError, HTTPException) as error:
            raise client.unreached(error) from error


def _show(watched: Watched, console: Console, every_s: float) -> NoReturn:
    if not console.is_terminal:
        while True:
            console.print(picture(watched))
            time.sleep(every_s)
            watched.ask_on()
    with Live(picture(watched), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            watched.ask_on()
            live.update(picture(watched), refresh=True)


# ---- the picture ----------------------------------------------------------------------------


def picture(watched: Watched) -> RenderableType:
    """All that is known, at most `WIDTH` columns wide."""
    parts: list[RenderableType] = [_head(watched), _figures(watched), _engines(watched)]
    if watched.events:
        parts.append(_events(watched.events))
    if watched.state["failure_groups"]:
        parts.append(_groups(watched.state))
    return Group(*parts)


def _head(watched: Watched) -> str:
    engines = watched.state["engines"]
    up = sum(engine["state"] == "up" for engine in engines)
    color = "green" if up == len(engines) else "red"
    at = _clock(watched.state["at"])
    head = f"[{color}]{up} of {len(engines)} engines up[/] · {at} · Ctrl-C ends"
    if watched.away_since is None:
        return head
    why = escape(cleaned(watched.why))
    return f"[red]no answer since {_clock(watched.away_since)}[/] ({why})\nwhat follows is of {at}"


class _Row(NamedTuple):
    """`needs`: a part of the router's state without which the row is left out."""

    name: str
    value: Callable[[Sample], float | None]
    shown: Callable[[float], str]
    needs: str | None = None


def _part(name: str, place: int) -> Callable[[Sample], float | None]:
    return lambda sample: (sample[name] or (None, None))[place]


def _plain(name: str) -> Callable[[Sample], float | None]:
    return lambda sample: sample.get(name)  # an older router does not tell all


def _usage(sample: Sample) -> float | None:
    return max((share for share in sample["kv"].values() if share is not None), default=None)


_ROWS = (
    _Row("requests/s", _plain("requests"), lambda value: _short(value)),
    _Row("failed/s", _plain("failed"), lambda value: _short(value)),
    _Row("tokens/s", _plain("tokens"), lambda value: _short(value)),
    _Row("first token p50", _part("ttft", 0), lambda value: _time(value)),
    _Row("first token p99", _part("ttft", 1), lambda value: _time(value)),
    _Row("between tokens p50", _part("between", 0), lambda value: _time(value)),
    _Row("between tokens p99", _part("between", 1), lambda value: _time(value)),
    _Row("in flight", _plain("in_flight"), lambda value: count(value)),
    _Row("queued", _plain("queued"), lambda value: count(value)),
    _Row("KV use, fullest", _usage, lambda value: f"{value:.1%}"),
    _Row("moved, mean GB/s", _plain("speed"), lambda value: f"{value / 1e9:.2f}"),
    _Row("moved, hidden", _plain("hidden"), lambda value: f"{value:.1%}"),
    _Row("prompts from caches", _plain("spared"), lambda value: f"{value:.1%}", "caches"),
    _Row("shared, tokens/s", _plain("shared"), lambda value: _short(value), "sharing"),
)


def _compact(title: str, *columns: str) -> Table:
    made = titled(title, *columns)
    made.box, made.show_edge = box.SIMPLE_HEAD, False
    return made


def _figures(watched: Watched) -> Table:
    made = _compact("Last ten minutes", "figure", "now", "age", "largest", "history")
    now = watched.state["at"]
    router = watched.state["router"]
    for row in _ROWS:
        if row.needs is not None and router.get(row.needs) is None:
            continue
        pairs = [(sample["at"], row.value(sample)) for sample in watched.samples]
        known = [(at, value) for at, value in pairs if value is not None]
        if not known:
            made.add_row(row.name, "-", "", "-", "")
            continue
        at, value = known[-1]
        old = _age(now - at) if now - at > _OLD_S else ""
        largest = max(value for _, value in known)
        made.add_row(
            row.name, row.shown(value), old, row.shown(largest), _line(known, now, largest)
        )
    return made


def _line(known: Sequence[tuple[float, float]], now: float, largest: float) -> str:
    """A line of blocks, one for each `LENGTH_S / _LINE` seconds: the largest value in them."""
    places: list[float | None] = [None] * _LINE
    for at, value in known:
        place = min(_LINE - 1, max(0, int(_LINE * (1 - (now - at) / LENGTH_S))))
        before = places[place]
        places[place] = value if before is None else max(before, value)
    top = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[round(top * max(0.0, value) / largest) if largest else 0]
        for value in places
    )


def _engines(watched: Watched) -> Table:
    made = _compact(
        "Engines", "engine", "state", "for", "running", "waiting", "KV", "leases", "MB/s"
    )
    state, since = watched.state, watched.state["history"]["engines"]
    moved = watched.samples[-1]["to"] if watched.samples else {}
    for engine in state["engines"]:
        name, usage = engine["name"], engine.get("kv_usage")
        color = "green" if engine["state"] == "up" else "red"
        made.add_row(
            escape(name),
            f"[{color}]{escape(cleaned(engine['state']))}[/]",
            _age(state["at"] - since[name]) if name in since else "-",
            count(engine.get("running")),
            count(engine.get("waiting")),
            "-" if usage is None else f"{usage:.1%}",
            count(engine.get("leases")),
            f"{(moved.get(name) or 0.0) / 1e6:,.1f}" if engine["role"] == "decode" else "-",
        )
    return made


def _events(events: Sequence[dict[str, Any]]) -> Table:
    made = _compact("Deaths and restarts", "when", "engine", "what")
    for event in list(reversed(events))[:_EVENTS]:
        color = "green" if event["kind"] in _GOOD else "red"
        why = f": {escape(cleaned(event['why']))}" if event["why"] and event["kind"] != "up" else ""
        words = f"[{color}]{event['kind']}{why}[/]"
        made.add_row(_clock(event["at"]), escape(event["engine"]), words)
    return made


def _groups(state: dict[str, Any]) -> Table:
    made = _compact("Failures by reason", "count", "status", "what", "first", "last", "id")
    for group in state["failure_groups"][:_GROUPS]:
        made.add_row(
            count(group["count"]),
            str(group["status"]),
            escape(cleaned(group.get("why") or "(with --key-env only)")),
            _clock(group["first"]),
            _clock(group["last"]),
            escape(cleaned(group.get("id") or "-")),
        )
    return made


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5940 else f"{seconds / 3600:.1f} h"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
