"""Networks of their own on this machine, and a slow link between two of them.

For benchmarks and tests of engines on two hosts. Each network is a Linux namespace. It ends with
the last process that is on it and with this one, however they end, so nothing remains of it. Needs
root, iproute2, and Linux's tbf (a token bucket) for the link's speed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from disagg.errors import ConfigError, DisaggError

OWN_SYSFS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")
"""Before the command of a program that looks for network devices in /sys (UCX does): it then finds
those of its own network. The program keeps its process id."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_THIS = "/proc/thread-self/ns/net"
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
_COMMAND_S = 10
# With frames of 1500 bytes, headers would take 4 % of the link's bytes.
_MTU = 9000
# A bucket holds what flows in 2 ms, or one packet of the largest size before segmentation.
_BUCKET_S, _LEAST_BUCKET = 0.002, 128 << 10
_WAIT_MS = 200
"""The longest queue before a packet is dropped, as time on the link."""
_SENT = 8
"""The column of the bytes sent in /proc/net/dev, after the device's name."""
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def bits_per_s(text: str) -> int:
    """A rate as tc writes it, such as 25Gbit or 400Mbit. Raises ConfigError for anything else."""
    found = _RATE.fullmatch(text)
    rate = round(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if rate < 8:
        raise ConfigError(f"{text} — not a rate, such as 25Gbit or 400Mbit")
    return rate


def why_not() -> str | None:
    """Why there can be no paced link here, as a test's reason to skip; None if there can."""
    try:
        with Link() as link:
            link.pace(10**9)
    except DisaggError as error:
        return str(error)
    return None


class Network:
    """One network, at first with nothing but loopback. Raises DisaggError without the right to."""

    def __init__(self) -> None:
        with open(_THIS, "rb") as before:
            if _libc().unshare(_NEW_NETWORK):
                problem = os.strerror(ctypes.get_errno())
                raise DisaggError(f"no network namespaces here ({problem}); run it as root")
            try:
                self._descriptor = os.open(_THIS, os.O_RDONLY)
            finally:
                _enter(before.fileno())
        try:
            with self.inside():
                run("ip link set lo up")
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """For `ip`, as long as it is open."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets and programs that this thread opens or starts meanwhile are on this network."""
        with on_network(self._descriptor):
            yield

    def close(self) -> None:
        """It ends as soon as no process is on it."""
        os.close(self._descriptor)


class Link:
    """Two networks and one link between them, at first as fast as the machine.

    addresses, device: of the first and of the second network; the link's name on both. Raises
    DisaggError, which says what is not installed or which right is missing.
    """

    addresses = ("192.0.2.1", "192.0.2.2")  # from a block that is reserved for documentation
    device = "link0"

    def __init__(self) -> None:
        if missing := [name for name in _TOOLS if shutil.which(name) is None]:
            packages = sorted({_TOOLS[name] for name in missing})
            raise DisaggError(
                f"not installed: {', '.join(missing)}; apt install {' '.join(packages)}"
            )
        with ExitStack() as undo:
            first, second = self.networks = (_open(undo), _open(undo))
            with first.inside():
                ends = f"name {self.device} type veth peer name {self.device} netns {second.path}"
                run(f"ip link add {ends}")
            for network, address in zip(self.networks, self.addresses, strict=True):
                with network.inside():
                    run(f"ip address add {address}/24 dev {self.device}")
                    run(f"ip link set dev {self.device} up mtu {_MTU}")
            self._undo = undo.pop_all()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def pace(self, rate: int) -> None:
        """Let it carry so many bits per second in each direction. Loopback stays as it is."""
        bucket = max(_LEAST_BUCKET, round(rate / 8 * _BUCKET_S))
        words = f"tbf rate {rate}bit burst {bucket} latency {_WAIT_MS}ms"
        for network in self.networks:
            with network.inside():
                run(f"tc qdisc replace dev {self.device} root {words}")

    def sent(self, number: int) -> int:
        """Bytes that the first (0) or the second (1) network has sent over it, headers included."""
        with self.networks[number].inside():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        (counts,) = (line.split(":")[1].split() for line in lines if f"{self.device}:" in line)
        return int(counts[_SENT])


@contextmanager
def on_network(descriptor: int) -> Iterator[None]:
    """This thread is on that network meanwhile. descriptor: of a process's `/proc/…/ns/net`."""
    with open(_THIS, "rb") as before:
        _enter(descriptor)
        try:
            yield
        finally:
            _enter(before.fileno())


def run(words: str) -> None:
    """Run iproute2 on this thread's network. Raises DisaggError with its message."""
    done = subprocess.run(words.split(), capture_output=True, text=True, timeout=_COMMAND_S)
    if done.returncode:
        raise DisaggError(f"{words}: {done.stderr.strip()}")


def _open(undo: ExitStack) -> Network:
    network = Network()
    undo.callback(network.close)
    return network


def _enter(descriptor: int) -> None:
    if _libc().setns(descriptor, _NEW_NETWORK):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
