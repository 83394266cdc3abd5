"""Disturbs a running deployment at real boundaries: cuts sockets, stops processes for a while.

Linux only. Cutting needs the right to (`ss -K`, root); without it only processes are stopped.
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
    """Until `end`, does something bad every now and then to one of `workers`.

    `longest_stop_s`: more than a lease, so that leases run out under whoever is stopped.
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
        """Stop disturbing; returns when nobody is stopped any more."""
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
        """Cut one of the connections between workers, whichever transport it belongs to."""
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
    """vLLM's workers among our descendants."""
    return [p for p in psutil.Process().children(recursive=True) if _is_worker(p)]


def _is_worker(process: psutil.Process) -> bool:
    """By its title, or, since vLLM's titles do not always come off, as a spawned one's child."""
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
