"""What vLLM calls in each of its processes, as a general plugin (see pyproject.toml)."""

from __future__ import annotations

from disagg.engine import ending, forking, polling, reserving


def install() -> None:
    """Do what the environment asks for, let engines with our connector leave it memory, and
    workers end."""
    polling.install()
    forking.install()
    reserving.install()
    ending.install()
