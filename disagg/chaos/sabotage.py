"""Disturbs a running deployment: cuts sockets, and stops processes for a while.

Linux only. Cutting needs root (`ss -K`); without it only processes are stopped.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable

import psutil

WORKER, _CORE, _SPAWNED = "VLLM::Worker", "VLLM::EngineCore", "spawn_main"


class Saboteur(threading.Thread):
    """Until `end`, cuts a socket of one of `workers` or stops it, at random intervals.

    `longest_stop_s`: longer than a lease, so that leases of a stopped worker run out.
    """

    def __init__(
        self,
        longest_stop_s: float,
        workers: Callable[[], list[psutil.Process]] | None = None,
        seed: int = 3,
    ) -> None:
        super().__init__(name="saboteur", daemon=True)
        self.done: Counter[str] = Counter()
        self._longest_stop_s, self._workers = longest_stop_s, workers or all_workers
        self._random = random.Random(seed)
        self._over = threading.Event()

    def end(self) -> None:
        """Stop disturbing; returns when every process continues."""
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(self._random.uniform(0.05, 1.5)):
            if not (workers := self._workers()):
                continue
            worker = self._random.choice(workers)
            if self._random.random() < 0.7:
                self._cut(worker)
            else:
                self._freeze(worker)

    def _cut(self, worker: psutil.Process) -> None:
        """Cut one connection between workers, of any transport."""
        try:
            connections = worker.net_connections("tcp")
        except psutil.Error:
            return
        listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        ours = [c for c in connections if c.raddr and c.laddr.port in listening]
        if not ours:
            return
        victim = self._random.choice(ours)
        command = ["ss", "-K", "src", victim.laddr.ip, "sport", "=", str(victim.laddr.port)]
        command += ["dst", victim.raddr.ip, "dport", "=", str(victim.raddr.port)]
        result = subprocess.run(command, capture_output=True, timeout=10, check=False)
        self.done["sockets cut" if b"ESTAB" in result.stdout else "cuts refused"] += 1

    def _freeze(self, worker: psutil.Process) -> None:
        seconds = self._random.choice([0.05, 0.3, self._longest_stop_s])
        try:
            worker.send_signal(signal.SIGSTOP)
            self.done[f"stopped for {seconds:g} s"] += 1
            self._over.wait(seconds)
        except psutil.Error:
            return
        finally:
            with contextlib.suppress(psutil.Error):
                worker.send_signal(signal.SIGCONT)


def all_workers() -> list[psutil.Process]:
    """vLLM's workers among this process's descendants."""
    return [p for p in psutil.Process().children(recursive=True) if _is_worker(p)]


def _is_worker(process: psutil.Process) -> bool:
    """By its title, or, because vLLM does not always set it, as a spawned child of a core."""
    try:
        if WORKER in (line := _line(process)):
            return True
        parent = process.parent()
        return parent is not None and _SPAWNED in line and _is_core(_line(parent))
    except psutil.Error:
        return False


def _is_core(line: str) -> bool:
    return _CORE in line or _SPAWNED in line


def _line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
