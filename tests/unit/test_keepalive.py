"""A host that disappears, on simulated hosts: a connection to it fails."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.hosts import Hosts, why_not
from disagg import keepalive

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
LISTEN = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as listening:
    print("listens", flush=True)
    took = [listening.accept() for _ in range(2)]
    time.sleep(100)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(["here", "there"]) as hosts:
        yield hosts


@pytest.fixture
def waiting(hosts: Hosts, tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connections to a process of the other host, which never reads."""
    there, log = hosts["there"], tmp_path / "log"
    there.start([sys.executable, "-c", LISTEN, there.address], log)
    while b"listens" not in log.read_bytes():
        time.sleep(0.02)
    with hosts["here"].network():
        first = socket.create_connection((there.address, 5000), 5)
        second = socket.create_connection((there.address, 5000), 5)
    with first, second:
        for sock in (first, second):
            keepalive.watch(sock)
            sock.settimeout(4 * keepalive.SILENT_S)
        yield first, second


def test_a_silent_host_is_noticed(
    hosts: Hosts, waiting: tuple[socket.socket, socket.socket]
) -> None:
    """By a connection that has sent something, and by one that only waits."""
    first, second = waiting
    hosts.silence("there")
    first.sendall(b"are you there?")
    for sock in (first, second):
        with pytest.raises(OSError, match=r"timed out|No route") as raised:
            sock.recv(1)
        assert raised.value.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH)  # not its own time-out


def test_a_process_that_is_busy_or_stopped_is_not_taken_for_gone(
    hosts: Hosts, waiting: tuple[socket.socket, socket.socket]
) -> None:
    for process in hosts["there"].processes():
        if process.name().startswith("python"):
            os.kill(process.pid, signal.SIGSTOP)
    waiting[0].sendall(b"are you there?")
    for sock in waiting:
        sock.settimeout(1.6 * keepalive.SILENT_S / 2)
        with pytest.raises(TimeoutError) as raised:
            sock.recv(1)
        assert raised.value.errno is None
