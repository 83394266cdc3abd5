"""The owners of temporary files: names of processes, and whether such a process still lives."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import xxhash


def name() -> str:
    """This process's name: its machine, pid and start time."""
    return _name_of(os.getpid())


def is_dead(owner: str) -> bool | None:
    """Whether the process with this name has ended; None if that is unknown here."""
    try:
        machine, pid, started = owner.split("-")
        number = int(pid)
    except ValueError:
        return None
    if machine != _machine():
        return None
    return str(_start_time(number)) != started


@functools.lru_cache(maxsize=1)
def _name_of(pid: int) -> str:
    """Cached by pid, which differs after a fork."""
    return f"{_machine()}-{pid}-{_start_time(pid)}"


@functools.cache
def _machine() -> str:
    """Identifies a boot of a host and a pid namespace; containers on one host have several."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    except OSError:
        pass  # not Linux: use the host's name only
    return xxhash.xxh64_hexdigest("\n".join(parts).encode())


def _start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])  # ended, not reaped yet
