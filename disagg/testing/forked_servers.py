"""Servers that start in seconds: forks of `fork_server.py`."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from disagg.engine.vllm_patches.busy_poll import POLL_SLEEP_ENV
from disagg.testing.vllm_server import CPU_ENV

# Torch would compile the kernel of log probabilities on first use, for 20 s in each engine.
IMPORTED_WITH = {**CPU_ENV, "TORCHDYNAMO_DISABLE": "1"}
# Several engines share two cores. With the default of 50 us, polling takes a tenth of a core for
# each process of an engine in use. Numba would compile the search for n-grams, for 10 s.
STARTED_WITH = {POLL_SLEEP_ENV: "500", "NUMBA_DISABLE_JIT": "1"}


class Fork:
    """A process that is not our child. Its exit status is not known."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 if it has ended."""
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended."""
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return 0


class ForkServer:
    """The process to fork. python: one with vLLM and disagg, by default this one."""

    def __init__(self, python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "disagg.testing.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | IMPORTED_WITH,
            text=True,
        )

    def start(self, args: Sequence[str], env: dict[str, str], log: Path) -> Fork:
        """As `disagg.testing.vllm_server.spawn`. Waits until vLLM is imported, the first time."""
        asked = json.dumps({"args": list(args), "env": env | STARTED_WITH, "log": str(log)})
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(asked + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).strip().isdigit():
            assert line, "the fork_server ended"
        return Fork(int(line))

    def stop(self) -> None:
        """End it, and what it started."""
        with self._process as process:  # closes its pipes
            try:
                process.communicate(timeout=60)  # many processes may share a core
            except subprocess.TimeoutExpired:
                process.kill()
                raise
