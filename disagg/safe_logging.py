"""Log lines that peers and clients can neither forge nor flood.

Text from another process passes through `foreign` before it is part of a log line or an error.
Lines that anybody on the network can cause go through a `LimitedLog`.
"""

from __future__ import annotations

import logging
import threading
import time

_WINDOW_S = 60.0
_SUPPRESSED = "suppressed %d similar lines in the last minutes"


def foreign(text: object, limit: int = 200) -> str:
    """Text from another process, on one line: control characters, line ends and marks of direction
    are escaped as in `repr`. Of a longer text, the first `limit` characters. Escaping twice
    changes nothing."""
    whole = str(text)
    shown = whole[:limit]
    if not shown.isprintable():
        shown = "".join(
            one if one.isprintable() else one.encode("unicode_escape").decode() for one in shown
        )
    return shown if len(whole) <= limit else f"{shown}... ({len(whole)} characters)"


class LineLimit:
    """At most `lines` per minute. Safe for use from any thread."""

    def __init__(self, lines: int = 10) -> None:
        self._lines = lines
        self._begun = -_WINDOW_S
        self._written = self._left_out = 0
        self._lock = threading.Lock()

    def admit(self) -> int | None:
        """None: leave this line out. Else the number of lines left out before it, to be logged."""
        with self._lock:
            now, left_out = time.monotonic(), 0
            if now - self._begun >= _WINDOW_S:
                left_out, self._left_out = self._left_out, 0
                self._begun, self._written = now, 0
            if self._written >= self._lines:
                self._left_out += 1
                return None
            self._written += 1
            return left_out


class LimitedLog:
    """Logs at most `lines` lines per minute; then one line counts those that were left out.

    Safe for use from any thread.
    """

    def __init__(self, logger: logging.Logger, lines: int = 10) -> None:
        self._logger, self._limit = logger, LineLimit(lines)

    def warning(self, text: str, *args: object) -> None:
        """As `Logger.warning`."""
        self._log(logging.WARNING, text, args)

    def exception(self, text: str, *args: object) -> None:
        """As `Logger.exception`."""
        self._log(logging.ERROR, text, args, exc_info=True)

    def _log(
        self, level: int, text: str, args: tuple[object, ...], *, exc_info: bool = False
    ) -> None:
        left_out = self._limit.admit()
        if left_out is None:
            return
        if left_out:
            self._logger.warning(_SUPPRESSED, left_out)
        self._logger.log(level, text, *args, exc_info=exc_info)


class LimitedWarnings(logging.Filter):
    """For another library's logger: at most ten of its warnings per minute pass."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = LineLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        """Also adds to a warning how many were left out before it."""
        if record.levelno != logging.WARNING:
            return True
        left_out = self._limit.admit()
        if left_out:
            shown = record.getMessage()
            record.msg, record.args = f"{shown} ({_SUPPRESSED % left_out})", ()
        return left_out is not None
