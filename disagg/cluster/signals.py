"""Ctrl-C, SIGTERM and SIGHUP: the first signal stops in order, the second one kills at once.

The first signal raises `Interrupted` in the main thread. So it also interrupts a start that waits
inside a library. Once a stop has begun, no signal raises: an interrupted clean-up would leave
processes behind.

A lost terminal sends SIGHUP, and sends it twice in some shells: a second one does not kill. Under
`nohup` it stays ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user asked to stop."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


class StopSignals:
    """Context manager that handles these signals. Main thread only."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self._armed = True
        self._count = 0
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        assert threading.current_thread() is threading.main_thread()
        self._previous = {signum: signal.getsignal(signum) for signum in SIGNALS}
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def install(self) -> None:
        """Set the signal handlers. Call it again after `ray.init`, which sets its own."""
        for signum in SIGNALS:
            if signum != signal.SIGHUP or self._previous[signum] != signal.SIG_IGN:
                signal.signal(signum, self._on_signal)
        if self._received is not None:
            raise Interrupted(self._received)

    @contextmanager
    def as_interrupted(self) -> Iterator[None]:
        """After a signal, leave the block with `Interrupted`, whatever exception the block raises.

        Ray's compiled code turns an exception from a signal handler into a SystemError.
        """
        try:
            yield
        except BaseException as error:
            if self._received is None or isinstance(error, Interrupted):
                raise
            raise Interrupted(self._received) from None

    def disarm(self) -> None:
        """Ignore a first signal from now on: the stop has begun."""
        self._armed = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            if signum != signal.SIGHUP:
                self._kill()
        elif self._armed:
            self._armed = False
            self._received = signum
            raise Interrupted(signum)


def handler_restorer() -> Callable[[], None]:
    """Returns a function that restores the current signal handlers.

    The handler of SIGTERM that `ray.init` sets aborts the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}

    def restore() -> None:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)

    return restore
