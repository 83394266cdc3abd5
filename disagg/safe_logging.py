"""Log lines that peers and clients can neither forge nor flood.

Text from another process passes through `foreign` before it is part of a log line or an error.
Lines that anybody on the network can cause go through a `LimitedLog`.
"""

from __future__ import annotations

import logging
import threading
import time

_WINDOW_S = 60.0


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


class LimitedLog:
    """At most `lines` lines per minute; then one line counts those that were left out.

    Safe for use from any thread.
    """

    def __init__(self, logger: logging.Logger, lines: int = 10) -> None:
        self._logger, self._lines = logger, lines
        self._begun = -_WINDOW_S
        self._written = self._left_out = 0
        self._lock = threading.Lock()

    def warning(self, text: str, *args: object) -> None:
        """As `Logger.warning`."""
        self._log(logging.WARNING, text, args)

    def exception(self, text: str, *args: object) -> None:
        """As `Logger.exception`."""
        self._log(logging.ERROR, text, args, exc_info=True)

    def _log(
        self, level: int, text: str, args: tuple[object, ...], *, exc_info: bool = False
    ) -> None:
        left_out = 0
        with self._lock:
            now = time.monotonic()
            if now - self._begun >= _WINDOW_S:
                left_out, self._left_out = self._left_out, 0
                self._begun, self._written = now, 0
            if self._written >= self._lines:
                self._left_out += 1
                return
            self._written += 1
        if left_out:
            self._logger.warning("suppressed %d similar lines in the last minutes", left_out)
        self._logger.log(level, text, *args, exc_info=exc_info)
