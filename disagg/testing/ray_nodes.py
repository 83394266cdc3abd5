"""A Ray cluster of several nodes on this machine; each node can be killed.

A node is started by `ray start`, and killed by a SIGKILL to its raylet. All processes end with the
context.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

from disagg.cluster.ray_session import SLOW_START
from disagg.errors import DisaggError
from disagg.testing.ports import free_port

START_S, END_S = 60.0, 20.0
TRIES = 3
ADDRESS_ENV = "RAY_ADDRESS"


class RayNodes:
    """A head without CPUs and `workers` nodes with `cpus` each; sets RAY_ADDRESS.

    `gpus`: how many GPUs each worker declares. `dashboard`: the head serves Ray's dashboard and
    accepts jobs at `dashboard_url`. `labels`: of the workers.
    """

    def __init__(
        self,
        workers: int,
        cpus: int,
        *,
        gpus: int = 0,
        dashboard: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._workers, self._cpus, self._gpus, self._labels = workers, cpus, gpus, labels or {}
        self._dashboard_port = free_port() if dashboard else None
        self._folder = Path(tempfile.mkdtemp(prefix="rn-", dir="/tmp"))
        self._started: list[subprocess.Popen[bytes]] = []
        self._address = f"127.0.0.1:{free_port()}"
        self._before = os.environ.get(ADDRESS_ENV)

    @property
    def dashboard_url(self) -> str:
        """The URL of the head's dashboard."""
        return f"http://127.0.0.1:{self._dashboard_port}"

    def __enter__(self) -> RayNodes:
        try:
            for _ in range(1 + self._workers):
                self.add()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        os.environ[ADDRESS_ENV] = self._address
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.environ.pop(ADDRESS_ENV, None)
        if self._before is not None:
            os.environ[ADDRESS_ENV] = self._before
        for process in reversed(self._started):
            _end(process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self) -> None:
        """Start a node; returns when it is one. The first is the head."""
        for left in reversed(range(TRIES)):
            try:
                self._add()
                return
            except DisaggError as error:
                if not left or SLOW_START not in str(error):
                    raise
                _end(self._started.pop())

    def _add(self) -> None:
        head = not self._started
        words = self._head_words() if head else self._worker_words()
        log = self._folder / f"node-{len(self._started)}.log"
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            *words,
            "--node-ip-address=127.0.0.1",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--num-cpus={0 if head else self._cpus}",
            f"--object-store-memory={80 << 20}",
            f"--dashboard-agent-listen-port={free_port()}",
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | {"RAY_AUTH_MODE": "disabled"},  # it is on loopback alone
            )
        self._started.append(process)
        deadline = time.monotonic() + START_S
        while b"Ray runtime started" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise DisaggError(f"a Ray node did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)

    def _worker_words(self) -> list[str]:
        labels = ",".join(f"{name}={value}" for name, value in self._labels.items())
        words = [f"--address={self._address}", f"--num-gpus={self._gpus}"]
        return [*words, *([f"--labels={labels}"] if labels else [])]

    def _head_words(self) -> list[str]:
        dashboard = (
            ["--include-dashboard=false"]
            if self._dashboard_port is None
            else ["--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard_port}"]
        )
        port = self._address.rpartition(":")[2]
        return ["--head", f"--port={port}", f"--temp-dir={self._folder}", *dashboard]

    def processes(self) -> list[psutil.Process]:
        """All processes of the nodes."""
        return [
            child
            for process in self._started
            if process.poll() is None
            for child in psutil.Process(process.pid).children(recursive=True)
        ]

    def kill_node_of(self, pid: int) -> None:
        """Kill the node on which this process, or an ancestor of it, is an actor."""
        raylets = {p.pid for p in psutil.process_iter() if p.name() == "raylet"}
        process = psutil.Process(pid)
        raylet = next(parent for parent in process.parents() if parent.pid in raylets)
        raylet.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        processes = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        processes = []
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    for left in processes:
        try:
            left.kill()
        except psutil.NoSuchProcess:
            continue
