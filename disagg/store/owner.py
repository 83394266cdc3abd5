"""Who is writing a temporary file: names that say it, and whether that process still lives."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

import xxhash


def name() -> str:
    """This process: where it runs, its number, and when it began."""
    return _name_of(os.getpid())


def is_dead(owner: str) -> bool | None:
    """Whether the process with this name has ended; None if it can't be known from here."""
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
    """Cached by process number: after a fork it is another one."""
    return f"{_machine()}-{pid}-{_start_time(pid)}"


@functools.cache
def _machine() -> str:
    """A boot of a host and its process numbers: containers on one host have several of these."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    except OSError:
        pass  # not Linux: the host's name has to do
    return xxhash.xxh64_hexdigest("\n".join(parts).encode())


def _start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])  # ended, not yet waited for
