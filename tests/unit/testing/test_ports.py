"""Ports that are given to servers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from disagg.testing.ports import free_port

GIVES = """
import json, sys
from disagg.testing.ports import free_port
print(json.dumps([free_port() for _ in range(100)]), flush=True)
sys.stdin.read()
"""
HIGHEST_OF_OURS = 32_767


def test_processes_are_given_different_ports() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", GIVES], **pipes) for _ in range(3)]  # type: ignore[call-overload]
    given = [json.loads(process.stdout.readline()) for process in processes]
    given.append([free_port() for _ in range(100)])
    for process in processes:
        process.communicate()
    assert len({port for ports in given for port in ports}) == 400


def test_no_connection_takes_one_meanwhile() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() <= HIGHEST_OF_OURS
    assert lowest > HIGHEST_OF_OURS


def test_ports_in_use_are_passed_over() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))
        taken = sock.getsockname()[1]
        assert taken not in {free_port() for _ in range(300)}
