"""Child processes of a benchmark: start, call with a deadline, end by pid.

A child holds one object and serves calls of its methods over a pipe. It ends when the pipe closes,
so it never outlives the benchmark. Its output goes to a log file.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from disagg.errors import DisaggError

START_S = 60.0


class ChildError(DisaggError):
    """A child refused to start, failed in a call, died or passed its deadline."""


class Child:
    """One process with one object, made there by `make(*args)`."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *args: Any,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        # One process imports torch, and all children are forks of it. That saves seconds per child.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", make.__module__])
        self._conn, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, log, dict(env or {}), make, args), name=name, daemon=True
        )
        self._log = log
        self._process.start()
        theirs.close()

    def start_call(self, method: str, *args: Any) -> None:
        """Begin a call; `result` must follow."""
        self._conn.send((method, args))

    def result(self, timeout_s: float) -> Any:
        """The answer of the last `start_call`."""
        name = self._process.name
        try:
            if not self._conn.poll(timeout_s):
                raise ChildError(f"{name}: no answer within {timeout_s:g} s")
            ok, value = self._conn.recv()
        except (EOFError, OSError) as error:
            raise ChildError(f"{name} died; end of its log: {self._tail()}") from error
        if not ok:
            raise ChildError(f"{name}: {value}")
        return value

    def call(self, method: str, *args: Any, timeout_s: float = START_S) -> Any:
        """Call a method of the object; raises `ChildError`."""
        self.start_call(method, *args)
        return self.result(timeout_s)

    def pause(self) -> None:
        """Stop it (SIGSTOP): some libraries poll without end even when idle."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue it (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Close the pipe; kill what has not ended 3 s later."""
        self._conn.close()
        self.resume()
        self._process.join(3)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(3)

    def _signal(self, number: int) -> None:
        # The child was not waited for, so its pid is not reused; an ended child ignores signals.
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def _tail(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return " | ".join(text.strip().splitlines()[-3:]) or "none"


def _serve(
    conn: Connection,
    log: Path,
    env: dict[str, str],
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    served = None
    while True:
        try:
            method, call_args = conn.recv()
        except (EOFError, OSError):
            break
        try:
            # Made by the first call, so that its errors reach a caller.
            served = make(*args) if served is None else served
            answer = True, getattr(served, method)(*call_args)
        except Exception as error:  # noqa: BLE001 (sent to the caller)
            answer = False, f"{type(error).__name__}: {error}"
        conn.send(answer)
    os._exit(0)  # threads of libraries may never end
