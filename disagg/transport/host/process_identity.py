"""Identities of hosts and processes that stay unique when pids are reused."""

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
    """Identifies one boot of one host; the same for all its processes."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> int:
    """Processes in the same pid namespace see the same pids."""
    return Path("/proc/self/ns/pid").stat().st_ino
