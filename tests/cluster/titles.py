"""What a process is, from its command line."""

from __future__ import annotations

import psutil


def title(process: psutil.Process) -> str:
    """A process's command line or title; empty if the process ends."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
