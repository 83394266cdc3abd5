"""Networks of this machine and the paced link between two of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from disagg.errors import ConfigError, DisaggError
from disagg.testing import network
from disagg.testing.network import Link, Network, bits_per_s

WHY_NOT = network.why_not()
real = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SLOW = 40_000_000
SECONDS = 3


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25Gbit", 25 * 10**9), ("400mbit", 4 * 10**8), ("2.5gbit", 25 * 10**8), ("900bit", 900)],
)
def test_rates(text: str, rate: int) -> None:
    assert bits_per_s(text) == rate


@pytest.mark.parametrize("text", ["", "25", "fast", "0Mbit", "-1Gbit", "1GB", "1e9bit", "1 Gbit"])
def test_what_is_not_a_rate(text: str) -> None:
    with pytest.raises(ConfigError, match="not a rate, such as 25Gbit"):
        bits_per_s(text)


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == "tc" else f"/usr/bin/{name}")
    with pytest.raises(DisaggError, match="not installed: tc; apt install iproute2"):
        Link()


@pytest.fixture
def link() -> Iterator[Link]:
    with Link() as link:
        yield link


@real
@pytest.mark.parametrize("sender", [0, 1])
def test_a_paced_link_carries_its_rate(link: Link, sender: int) -> None:
    link.pace(SLOW)
    count = SLOW // 8 * SECONDS
    seconds = _seconds(link, sender, count)
    assert 0.8 < count * 8 / seconds / SLOW < 1.2


@real
def test_loopback_is_not_paced(link: Link) -> None:
    """So a client on the same network may reach an engine there at any speed."""
    link.pace(SLOW // 40)  # it would take two minutes
    with link.networks[0].inside():
        listening = socket.create_server(("127.0.0.1", 0))
        sending = socket.create_connection(listening.getsockname(), 5)
    with listening, sending, listening.accept()[0] as receiving, ThreadPoolExecutor(1) as pool:
        receiving.settimeout(30)
        sent = pool.submit(sending.sendall, bytes(SLOW // 8 * SECONDS))
        assert _received(receiving, SLOW // 8 * SECONDS) < 30
        sent.result(30)


@real
def test_only_the_link_is_there(link: Link) -> None:
    """Programs that start inside are on that network, and this thread returns to its own."""
    here = os.readlink("/proc/thread-self/ns/net")
    words = [sys.executable, "-c", "import socket; print(dict(socket.if_nameindex()).values())"]
    with link.networks[0].inside():
        assert os.readlink("/proc/thread-self/ns/net") != here
        seen = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    assert os.readlink("/proc/thread-self/ns/net") == here
    assert link.device in seen
    assert "lo" in seen
    assert "eth0" not in seen
    assert link.device not in [name for _, name in socket.if_nameindex()]


@real
def test_an_error_inside_leads_out() -> None:
    here = os.readlink("/proc/thread-self/ns/net")
    one = Network()
    with pytest.raises(DisaggError, match="ip link set nothing up"), one.inside():
        network.run("ip link set nothing up")
    one.close()
    assert os.readlink("/proc/thread-self/ns/net") == here


HOLD = """
import os, sys, time
from disagg.testing.network import Link
with Link() as link:
    print(*(os.stat(one.path).st_ino for one in link.networks), flush=True)
    time.sleep(100)
"""


@real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_remains_however_its_process_ends(number: signal.Signals) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder, holder.stdout:
        made = {f"net:[{inode}]" for inode in holder.stdout.readline().split()}
        assert len(made) == 2
        holder.send_signal(number)
        holder.wait(30)
    assert made & set(_networks()) == set()


def _networks() -> Iterator[str]:
    """Those that processes of this machine are on or hold open."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        for path in (f"/proc/{process}/ns/net", *_descriptors(process)):
            try:
                yield os.readlink(path)
            except OSError:
                continue  # it ended


def _descriptors(process: str) -> list[str]:
    try:
        return [f"/proc/{process}/fd/{number}" for number in os.listdir(f"/proc/{process}/fd")]
    except OSError:
        return []


def _seconds(link: Link, sender: int, count: int) -> float:
    """How long so many bytes take over the link."""
    receiver = 1 - sender
    with link.networks[receiver].inside():
        listening = socket.create_server((link.addresses[receiver], 0))
    with link.networks[sender].inside():
        sending = socket.create_connection(listening.getsockname(), 5)
    with listening, sending, listening.accept()[0] as receiving, ThreadPoolExecutor(1) as pool:
        receiving.settimeout(30)
        sent = pool.submit(sending.sendall, bytes(count))
        seconds = _received(receiving, count)
        sent.result(30)
    return seconds


def _received(receiving: socket.socket, count: int) -> float:
    """Seconds from the first byte to the last one."""
    buffer, left, began = bytearray(1 << 20), count, 0.0
    while left > 0:
        got = receiving.recv_into(buffer)
        assert got, f"the connection ended with {left} bytes to come"
        began = began or time.monotonic()
        left -= got
    return time.monotonic() - began
