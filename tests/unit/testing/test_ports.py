"""Ports that are given to servers."""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from disagg.testing.ports import free_port

GIVES = """
import json, sys
from disagg.testing.ports import free_port
print(json.dumps([free_port() for _ in range(100)]), flush=True)
sys.stdin.read()
"""
FIRST_OF_CONNECTIONS = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_processes_are_given_different_ports() -> None:
    command, pipe = [sys.executable, "-c", GIVES], subprocess.PIPE
    given = {free_port() for _ in range(100)}
    with ExitStack() as stack:
        processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(3)]
        for process in processes:
            stack.enter_context(process)
            assert process.stdout is not None
            given.update(json.loads(process.stdout.readline()))
    assert len(given) == 400


def test_a_fork_is_given_other_ports() -> None:
    given = {free_port() for _ in range(100)}
    with multiprocessing.get_context("fork").Pool(1) as pool:
        given.update(pool.apply(free_port) for _ in range(100))
    assert len(given) == 200


@pytest.mark.skipif(FIRST_OF_CONNECTIONS < 32_768, reason="connections have other ports here")
def test_no_connection_takes_one_meanwhile() -> None:
    assert all(free_port() < FIRST_OF_CONNECTIONS for _ in range(100))


def test_ports_in_use_are_passed_over() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))
        taken = sock.getsockname()[1]
        assert taken not in {free_port() for _ in range(300)}
