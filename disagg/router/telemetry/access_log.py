"""The access log: one JSON line per request, with its id, engines, times and outcome; and one line
per operator's call.

A line must never contain any part of a prompt, an answer or a key, nor a byte that a terminal
interprets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.types import Send

ID_HEADER = "x-request-id"
logger = logging.getLogger(__name__)
_ids = random.Random()

_LONGEST_PATH = 512
_DELETE = "\x7f"  # the only control character that JSON does not escape

# The ids that a client may choose. An id gets into logs and headers of three processes.
_ID = re.compile(r"[!-~]{1,128}")


def request_id(given: str | None) -> str:
    """The client's id if it is made of 1 to 128 visible ASCII characters, else a new one."""
    return given if given and _ID.fullmatch(given) else f"{_ids.getrandbits(128):032x}"


class _Line(msgspec.Struct, omit_defaults=True):
    """The fields of a line. Fields with their default value are left out."""

    status: int | None = None
    id: str = ""
    route: str = ""
    client: str | None = None
    key: str | None = None
    deployment: str = ""
    prefill: str | None = None
    decode: str | None = None
    source: str | None = None
    local: str | None = None
    followed: str | None = None
    retries: int = 0
    migrations: int = 0
    queued_ms: float | None = None
    prefill_ms: float | None = None
    first_byte_ms: float | None = None
    total_ms: float | None = None


_encode = msgspec.json.Encoder().encode


class Metered(Protocol):
    """What follows an answer to a client with limits. `request.metering.Metering` is one."""

    def wrap(self, send: Send) -> Send:
        """The same, and counts what is sent."""

    def finish(self) -> None:
        """The answer has ended."""


@dataclass(slots=True)
class Record:
    """One request, filled in while it is served. Times are seconds from its arrival. `deployment`:
    that serves it, if the router has several. `source`: the engine whose cache served another one.
    `followed`: as `disagg_router_followed_total` counts it. `early_s`: when decode's leg was sent,
    if prefill had not answered."""

    route: str
    id: str
    client: str | None = None
    key_name: str | None = None
    deployment: str = ""
    began: float = field(default_factory=time.monotonic)
    prefill: str | None = None
    prefill_s: float | None = None
    decode: str | None = None
    source: str | None = None
    first_byte_s: float | None = None
    local: str | None = None
    followed: str | None = None
    early_s: float | None = None
    retries: int = 0
    migrations: int = 0
    queued_s: float | None = None
    metering: Metered | None = None
    trace: Mapping[str, str] = field(default_factory=dict)  # trace context for the engines

    def elapsed(self) -> float:
        """Seconds since the request's arrival."""
        return time.monotonic() - self.began

    def shown(self) -> dict[str, Any]:
        """The fields that are known so far."""
        shown: dict[str, Any] = msgspec.to_builtins(self._line())
        return shown

    def line(self, status: int) -> bytes:
        """The line of a finished request, as JSON."""
        return _encode(self._line(status))

    def _line(self, status: int | None = None) -> _Line:
        return _Line(
            status,
            self.id,
            self.route,
            self.client,
            self.key_name,
            self.deployment,
            self.prefill,
            self.decode,
            self.source,
            self.local,
            self.followed,
            self.retries,
            self.migrations,
            _ms(self.queued_s),
            _ms(self.prefill_s),
            _ms(self.first_byte_s),
            _ms(self.elapsed()),
        )


class AccessLog:
    """Writes the lines of one app to standard output: those of requests if enabled, those of
    operators' calls always.

    It does not use Python's logging, which would take a twelfth of the router's time per request.
    A failed write must never fail a request.
    """

    def __init__(self, *, enabled: bool, shows_clients: bool = False) -> None:
        self._enabled, self._has_failed = enabled, False
        self.shows_clients = shows_clients
        """Whether lines have the client's address."""
        self._lines: list[str] = []

    def write(self, record: Record, status: int) -> None:
        """The request is finished. Lines of one turn of the event loop are written together."""
        if self._enabled:
            self._add(record.line(status).decode())

    def audit(self, call: Mapping[str, object]) -> None:
        """An operator's call is finished: its `path` is cut, and all its text is escaped."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        shown = {"audit": at, **call, "path": str(call["path"])[:_LONGEST_PATH]}
        self._add(json.dumps(shown, separators=(",", ":")).replace(_DELETE, "\\u007f"))

    def _add(self, line: str) -> None:
        self._lines.append(f"{line}\n")
        if len(self._lines) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        try:
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            if not self._has_failed:
                logger.warning("cannot write the access log: %s", error)
            self._has_failed = True


def _ms(seconds: float | None) -> float | None:
    # In tenths as a whole number: with a number of digits, `round` takes five times as long.
    return None if seconds is None else round(seconds * 10_000) / 10
