"""Starts a server process for a benchmark and ends it with the benchmark."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPException

import psutil

from disagg.errors import StartupError
from disagg.testing.ports import free_port

START_S = 60.0
_END_S = 5.0


def launch(
    stack: ExitStack,
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    is_ready: Callable[[str], bool] | None = None,
    start_s: float = START_S,
    port: int | None = None,
) -> tuple[str, psutil.Process]:
    """Start a server and wait until it is ready; `stack` ends it, and what it started.

    `{port}` in a word of the command becomes `port`, or a free one. `env` goes on top of this
    process's. `is_ready` gets the URL; without it, the server's /health must answer. Returns the
    URL and the process. Raises `StartupError` with the end of its output.
    """
    port = port or free_port()
    log = tempfile.TemporaryFile()  # noqa: SIM115
    stack.callback(log.close)
    words = [word.replace("{port}", str(port)) for word in command]
    try:
        process = subprocess.Popen(
            words, env={**os.environ, **(env or {})}, stdout=log, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise StartupError(f"{name} did not start: {error}") from error
    stack.callback(_end, process)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + start_s
    while not (is_ready or _healthy)(url):
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            tail = log.read()[-2000:].decode(errors="replace")
            raise StartupError(f"{name} did not start:\n{tail}")
        time.sleep(0.05)
    return url, psutil.Process(process.pid)


def _healthy(url: str) -> bool:
    """Whether its /health answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # of HTTP, if another server has the port
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for left in started:
        with suppress(psutil.NoSuchProcess):
            left.kill()
