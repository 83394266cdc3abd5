"""Several simulated hosts on this machine, for tests of the network and of a host's death.

Each host has its own network, processes, name, shared memory and temporary folder. All hosts see
the other files of this machine. A switch connects the hosts with each other and with nothing else.
Their addresses are from the blocks reserved for documentation. Needs root (Linux namespaces),
iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from disagg.errors import DisaggError
from disagg.testing.network import on_network, run

_ALL = ("--net", "--pid", "--mount", "--uts", "--ipc")
_START_S, _END_S = 10.0, 10.0


def why_not() -> str | None:
    """Why hosts cannot be simulated here, as a test's reason to skip; None if they can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (util-linux, iproute2)"
    tried = subprocess.run(
        ["unshare", *_ALL, "--fork", "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
        timeout=10,
    )
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


class Host:
    """One simulated host. address, address6: those of its one network card, `net0`."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name, self.number, self.folder = name, number, folder
        self.address, self.address6 = f"192.0.2.{number}", f"2001:db8::{number:x}"
        self.pid = 0
        """Of its first process; all others end with it."""
        self.started: list[subprocess.Popen[bytes]] = []

    def words(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on this host, in the current working directory."""
        return ["nsenter", f"--target={self.pid}", *_ALL, f"--wd={Path.cwd()}", "--", *argv]

    def start(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a program on this host, with its output in a file. It ends with the host."""
        more = {"TMPDIR": str(self.folder), **(env or {})}
        with log.open("ab") as out:
            process = subprocess.Popen(
                self.words(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | more,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Sockets that this thread creates within the context are on the host's network."""
        with open(f"/proc/{self.pid}/ns/net", "rb") as there, on_network(there.fileno()):
            yield

    def processes(self) -> list[psutil.Process]:
        """The host's processes, by their ids outside of it."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found.append(process)
        return found


class Hosts:
    """Simulated hosts, by name, and their switch. Everything ends with the context."""

    def __init__(self, names: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
        """The path at which each host has its own temporary folder, empty at first."""
        self._hosts = {name: Host(name, i, self.folder) for i, name in enumerate(names, 1)}
        self._first: list[subprocess.Popen[bytes]] = []
        self._switch = 0

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __enter__(self) -> Hosts:
        try:
            self._switch = self._open(["ip link add switch type bridge", "ip link set switch up"])
            for host in self._hosts.values():
                self._begin(host)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self._first):
            process.kill()  # and, by --kill-child, all that is there
            process.communicate(timeout=_END_S)
        for host in self._hosts.values():
            for process in host.started:
                process.kill()  # nsenter stops with a program that is stopped
                process.wait(_END_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def silence(self, name: str) -> None:
        """Cut the host off the network. No peer gets a message about it."""
        _ip(self._switch, f"link set to-{name} nomaster")

    def hear(self, name: str) -> None:
        """Connect the host to the network again."""
        _ip(self._switch, f"link set to-{name} master switch")

    def power_off(self, name: str) -> None:
        """Cut the host off and kill its processes. No peer gets a message about it."""
        self.silence(name)
        os.kill(self._hosts[name].pid, 9)

    def _begin(self, host: Host) -> None:
        # A host's own name is not its address to it, as Debian's installer has it.
        own = {host.name: "127.0.1.1"}
        named = {h.name: h.address for h in self._hosts.values()} | own
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in named.items())]
        (self.folder / f"{host.name}.hosts").write_text("\n".join(lines) + "\n")
        host.pid = self._open(
            [
                f"hostname {host.name}",
                f"mount --bind {self.folder}/{host.name}.hosts /etc/hosts",
                "mount -t tmpfs tmpfs /dev/shm",
                f"mount -t tmpfs tmpfs {self.folder}",
                "ip link set lo up",
            ]
        )
        card = f"link add net0 netns {host.pid} type veth peer name to-{host.name}"
        _ip(self._switch, card)
        _ip(self._switch, f"link set to-{host.name} master switch up")
        _ip(host.pid, f"address add {host.address}/24 dev net0")
        # `nodad`: duplicate address detection would keep the address unusable for a second.
        _ip(host.pid, f"address add {host.address6}/64 dev net0 nodad")
        _ip(host.pid, "link set net0 up")
        _ip(host.pid, "route add default via 192.0.2.254")

    def _open(self, commands: Sequence[str]) -> int:
        """Create new namespaces. Returns the id of the first process in them."""
        # The first process does not wait for orphans, so they must end without a wait.
        last = "exec env --ignore-signal=CHLD sleep infinity"
        script = " && ".join([*commands, last])
        words = ["unshare", *_ALL, "--mount-proc", "--fork", "--kill-child", "sh", "-c", script]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._first.append(process)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and process.poll() is None:
            for child in psutil.Process(process.pid).children():
                if child.name() == "sleep":
                    return child.pid
            time.sleep(0.01)
        process.kill()
        said = process.communicate()[1].decode().strip()
        raise DisaggError(f"a host did not start: {said or 'no answer'}")


def _ip(pid: int, words: str) -> None:
    """Run iproute2 in the network of that process. Raises DisaggError with its message."""
    with open(f"/proc/{pid}/ns/net", "rb") as there, on_network(there.fileno()):
        run(f"ip {words}")
