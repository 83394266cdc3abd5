"""Runs a file's deployments in the foreground: shows progress and endpoint, stops in order.

The output is for a terminal and for a log file. This module must never decide anything about the
deployment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import psutil
from rich.console import Console
from rich.markup import escape

from disagg.cluster.deployment import RunningDeployment, start
from disagg.cluster.ray_session import token_file
from disagg.cluster.signals import Interrupted, StopSignals
from disagg.config import Deployment
from disagg.engine import guardian
from disagg.errors import StartupError
from disagg.router.topology import name_in

WATCH_S = 0.5
REPEAT_S = 15.0


class Progress:
    """Shows the state of the start: one live line on a terminal, else one line per change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._shown = ""
        self._shown_at = 0.0
        self._status = console.status("", spinner="dots") if console.is_terminal else None
        if self._status:
            self._status.start()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        line = escape(f"[{now - self._began:4.0f} s] {text}")
        if self._status:
            self._status.update(line)
        elif text != self._shown or now - self._shown_at > REPEAT_S:
            self._console.print(line)
            self._shown, self._shown_at = text, now

    def close(self) -> None:
        """End the live line."""
        if self._status:
            self._status.stop()


def serve(deployments: Sequence[Deployment]) -> int:
    """Serve the deployments of one file until Ctrl-C, SIGTERM or SIGHUP. Returns the exit status.

    0 after a stop, 1 if a deployment did not start or none can go on, 128 + signal if interrupted
    during the start. Raises ConfigError.
    """
    console = Console(soft_wrap=True, highlight=False)
    with StopSignals(_kill_at_once) as signals:
        progress = Progress(console)
        try:
            with signals.as_interrupted():
                running = start(
                    *deployments,
                    progress=progress,
                    signals=signals,
                    tell=lambda what, tail: _print_event(console, what, tail),
                )
        except Interrupted as interrupted:
            console.print("Interrupted during the start; everything was stopped.")
            return 128 + interrupted.signum
        except StartupError as error:
            progress.close()
            _print_failure(console, str(error), error.log_tail)
            return 1
        finally:
            progress.close()
        try:
            with signals.as_interrupted():
                _print_ready(console, running)
                return _watch(console, running)
        except Interrupted:
            console.print("Stopping … (Ctrl-C again kills at once)")
            return 0
        finally:
            signals.disarm()
            running.stop()


def _watch(console: Console, running: RunningDeployment) -> int:
    while True:
        problem = running.look_after(WATCH_S)
        if problem is not None:
            _print_failure(console, problem, "")
            return 1


def _print_event(console: Console, what: str, log_tail: str) -> None:
    if log_tail:
        console.print("Its last log lines:", style="dim")
        console.print(escape(log_tail), style="dim")
    console.print(escape(f"{time.strftime('%H:%M:%S')} {what}"))


def _print_failure(console: Console, what: str, log_tail: str) -> None:
    if log_tail:
        console.print("Its last log lines:", style="dim")
        console.print(escape(log_tail), style="dim")
    console.print(f"[bold red]Error:[/] {escape(what)}")


def _print_ready(console: Console, running: RunningDeployment) -> None:
    each = running.by_deployment
    for deployment, engines in each.items():
        for engine in engines:
            name = name_in(deployment if len(each) > 1 else "", engine.name)
            console.print(f"  {name:<10} {engine.url}  up in {engine.startup_s:.0f} s")
    models = {name: str(engines[0].model["name"]) for name, engines in each.items()}
    shown = "; ".join(f"{name}, model {model}" for name, model in models.items())
    console.print(f"\nReady: {running.url}/v1  ({escape(shown)})\n")
    model = next(iter(models.values()))
    console.print(
        escape(
            f"  curl {running.url}/v1/completions -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{model}", "prompt": "Hello", "max_tokens": 16}}\''
        )
    )
    console.print(f"\nStatus: {running.url}/ui, or: disagg status {running.url}")
    if running.dashboard_url:
        console.print(f"Ray's dashboard: {running.dashboard_url}")
        if token := token_file():
            console.print(f"It asks for a token once: the content of {token}")
    console.print("Ctrl-C stops it.")


def _kill_at_once() -> None:
    """After the second signal: kill our processes. The guardians clean up after the engines."""
    for process in psutil.Process().children(recursive=True):
        try:
            if guardian.__file__ not in process.cmdline():
                process.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(128 + signal.SIGINT)
