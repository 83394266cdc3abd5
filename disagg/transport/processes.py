"""Telling one process from another that has got its number since."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the start of `pid`; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
