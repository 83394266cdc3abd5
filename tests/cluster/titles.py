"""What a process is, by its command line."""

from __future__ import annotations

import psutil


def title(process: psutil.Process) -> str:
    """Its command line, or what it calls itself; nothing if it ends."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
