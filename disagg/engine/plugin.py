"""What vLLM calls in each of its processes, as a general plugin (see pyproject.toml)."""

from __future__ import annotations

from disagg.engine import forking, polling, reserving


def install() -> None:
    """Do what the environment asks for, and let engines with our connector leave it memory."""
    polling.install()
    forking.install()
    reserving.install()
