"""What became of one request: its id, its engines and its times, as one line of the access log."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

ID_HEADER = "x-request-id"
logger = logging.getLogger(__name__)
_ids = random.Random()

# What a client may call its request: it ends up in logs and headers of three processes.
_ID = re.compile(r"[!-~]{1,128}")


def request_id(given: str | None) -> str:
    """The client's own id if it is a plain word, else a new one."""
    return given if given and _ID.fullmatch(given) else f"{_ids.getrandbits(128):032x}"


@dataclass
class Record:
    """Filled in along the request's way. Times are seconds from its arrival."""

    route: str
    id: str
    key_name: str | None = None
    began: float = field(default_factory=time.monotonic)
    prefill: str | None = None
    prefill_s: float | None = None
    decode: str | None = None
    first_byte_s: float | None = None
    local: str | None = None
    retries: int = 0
    migrations: int = 0
    queued_s: float | None = None
    trace: Mapping[str, str] = field(default_factory=dict)  # trace context for the engines

    def elapsed(self) -> float:
        """Seconds since its arrival."""
        return time.monotonic() - self.began

    def shown(self) -> dict[str, Any]:
        """What is known of it by now."""
        shown: dict[str, Any] = {"id": self.id, "route": self.route}
        if self.key_name is not None:
            shown["key"] = self.key_name
        if self.prefill is not None:
            shown["prefill"] = self.prefill
        if self.decode is not None:
            shown["decode"] = self.decode
        if self.local is not None:
            shown["local"] = self.local
        if self.retries:
            shown["retries"] = self.retries
        if self.migrations:
            shown["migrations"] = self.migrations
        if self.queued_s is not None:
            shown["queued_ms"] = _ms(self.queued_s)
        if self.prefill_s is not None:
            shown["prefill_ms"] = _ms(self.prefill_s)
        if self.first_byte_s is not None:
            shown["first_byte_ms"] = _ms(self.first_byte_s)
        shown["total_ms"] = _ms(self.elapsed())
        return shown


class AccessLog:
    """One app's: a line of JSON a request, on standard output, or nothing.

    By itself, since Python's logging takes a twelfth of what a request costs the router. That
    nothing can be written there is no reason to fail a request.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled, self._has_failed = enabled, False
        self._lines: list[str] = []

    def write(self, record: Record, status: int) -> None:
        """The request is over. Lines of one turn of the event loop are written together."""
        if not self._enabled:
            return
        line = msgspec.json.encode({"status": status, **record.shown()})
        self._lines.append(f"{line.decode()}\n")
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        try:
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            if not self._has_failed:
                logger.warning("requests cannot be logged: %s", error)
            self._has_failed = True


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
