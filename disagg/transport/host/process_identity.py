"""Telling hosts and processes apart, also from others that have got their numbers since."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def boot_id() -> str:
    """The same for all processes of one host, and no other host, until it boots again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> int:
    """Processes know each other's pids if they are in the same one."""
    return Path("/proc/self/ns/pid").stat().st_ino
