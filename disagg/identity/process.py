"""Identifies processes by names that stay unique when pids are reused, and that other processes,
containers and hosts can judge: is that process still alive?"""

from __future__ import annotations

import functools
import os
import re
import socket
from pathlib import Path

import xxhash

NAME = r"[0-9a-f]{16}-\d+-\d+"
"""Matches a name: machine, pid and start time."""
_NAME = re.compile(NAME)


def name() -> str:
    """This process's name."""
    return _name_of(os.getpid())


def is_dead(owner: str) -> bool | None:
    """Whether the process with this name has ended; None if that is unknown here."""
    if not _NAME.fullmatch(owner):
        return None
    machine, pid, started = owner.split("-")
    if machine != _machine():
        return None
    return str(_running_since(int(pid))) != started


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None if there is no such process."""
    stat = _stat(pid)
    return None if stat is None else int(stat[19])


def boot_id() -> str:
    """Identifies one boot of one host; the same for all its processes."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> int:
    """Processes in the same pid namespace see the same pids."""
    return Path("/proc/self/ns/pid").stat().st_ino


@functools.lru_cache(maxsize=1)
def _name_of(pid: int) -> str:
    """Cached by pid, which differs after a fork."""
    return f"{_machine()}-{pid}-{start_time(pid)}"


@functools.cache
def _machine() -> str:
    """Identifies a boot of a host and a pid namespace; containers on one host have several."""
    parts = [socket.gethostname()]
    try:
        parts += [boot_id(), str(pid_namespace())]
    except OSError:
        pass  # not Linux: use the host's name only
    return xxhash.xxh64_hexdigest("\n".join(parts).encode())


def _running_since(pid: int) -> int | None:
    """As `start_time`; None also for a process that has ended and was not reaped yet."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in ("Z", "X") else int(stat[19])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
