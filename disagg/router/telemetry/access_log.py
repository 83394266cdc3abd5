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


class _Line(msgspec.Struct, omit_defaults=True):
    """What is shown of a request; what is not known, or did not happen, is left out."""

    status: int | None = None
    id: str = ""
    route: str = ""
    key: str | None = None
    prefill: str | None = None
    decode: str | None = None
    local: str | None = None
    retries: int = 0
    migrations: int = 0
    queued_ms: float | None = None
    prefill_ms: float | None = None
    first_byte_ms: float | None = None
    total_ms: float | None = None


_encode = msgspec.json.Encoder().encode


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
        shown: dict[str, Any] = msgspec.to_builtins(self._line())
        return shown

    def line(self, status: int) -> bytes:
        """The same as JSON, of a request that is over."""
        return _encode(self._line(status))

    def _line(self, status: int | None = None) -> _Line:
        return _Line(
            status,
            self.id,
            self.route,
            self.key_name,
            self.prefill,
            self.decode,
            self.local,
            self.retries,
            self.migrations,
            _ms(self.queued_s),
            _ms(self.prefill_s),
            _ms(self.first_byte_s),
            _ms(self.elapsed()),
        )


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
        self._lines.append(f"{record.line(status).decode()}\n")
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


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
