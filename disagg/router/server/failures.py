"""The requests that failed, were retried or moved: the latest ones, and all of them in groups.

A group has one status and one reason. Without a key, viewers see no ids, and no reasons but those
that this module gives, because an engine or a client may have written the others.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from disagg.router.telemetry.access_log import Record

_LATEST = 50
_MOST_GROUPS = 50
_LONGEST_REASON = 200
_MOVED, _RETRIED, _NONE = _OWN_REASONS = ("stream moved", "retried", "no reason")
_DIGITS = re.compile(r"[0-9]+")
# What everybody may see of a failure. An engine or a client may have written `why` and `id`.
_OPEN_FIELDS = frozenset(
    ["at", "status", "route", "deployment", "prefill", "decode", "local", "retries", "migrations"]
)

Shown: TypeAlias = dict[str, Any]
"""`latest` and `groups`, each a list, the latest first. A group has status, why, count, first, last
(seconds since 1970), and the id of its latest request."""


class Failures:
    """The failures of one router process. Bounded: the group that is longest without a failure goes
    first."""

    def __init__(self) -> None:
        self._latest: deque[dict[str, Any]] = deque(maxlen=_LATEST)
        self._groups: dict[tuple[int, str], dict[str, Any]] = {}

    def note(self, status: int, record: Record, why: str | None) -> None:
        """Record a finished request, if any part of it failed."""
        if status < 500 and not record.retries and not record.migrations:
            return
        shown = record.shown()
        shown.pop("key", None)
        shown.pop("client", None)
        now = time.time()
        self._latest.append({"at": now, "status": status, "why": why, **shown})
        reason = _reason(why, record)
        group = self._groups.pop((status, reason), None)
        if group is None:
            group = {"status": status, "why": reason, "count": 0, "first": now}
            if len(self._groups) == _MOST_GROUPS:
                del self._groups[next(iter(self._groups))]
        self._groups[status, reason] = {
            **group,
            "count": group["count"] + 1,
            "last": now,
            "id": record.id,
        }

    def shown(self) -> Shown:
        """What this process knows."""
        return {
            "latest": list(reversed(self._latest)),
            "groups": list(reversed(self._groups.values())),
        }


def _reason(why: str | None, record: Record) -> str:
    """The same for failures that differ only in numbers, such as ports and seconds."""
    if why is None:
        return _MOVED if record.migrations else _RETRIED if record.retries else _NONE
    return _DIGITS.sub("N", why)[:_LONGEST_REASON]


def merged(each: Iterable[Shown]) -> Shown:
    """The failures of several processes as one."""
    latest: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    for shown in each:
        latest += shown["latest"]
        groups += shown["groups"]
    latest.sort(key=lambda failure: failure["at"], reverse=True)
    return {"latest": latest[:_LATEST], "groups": _united(groups)[:_MOST_GROUPS]}


def open_part(shown: Shown) -> Shown:
    """What a viewer without a key may see: groups by status, and by our own reasons."""
    latest = [
        {name: value for name, value in failure.items() if name in _OPEN_FIELDS}
        for failure in shown["latest"]
    ]
    return {"latest": latest, "groups": _united(map(_open_group, shown["groups"]))}


def _open_group(group: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in group.items() if name not in ("why", "id")}
    return {**shown, "why": group["why"]} if group["why"] in _OWN_REASONS else shown


def _united(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of the same status and reason as one, the latest first."""
    united: dict[tuple[int, str | None], dict[str, Any]] = {}
    for group in groups:
        key = group["status"], group.get("why")
        other = united.get(key)
        if other is None:
            united[key] = dict(group)
            continue
        newer = group if group["last"] > other["last"] else other
        united[key] = {
            **newer,
            "count": group["count"] + other["count"],
            "first": min(group["first"], other["first"]),
        }
    return sorted(united.values(), key=lambda group: group["last"], reverse=True)
