"""What vLLM calls in each of its processes, as a general plugin (see pyproject.toml)."""

from __future__ import annotations

from disagg.engine import forking, polling


def install() -> None:
    """Do what the environment asks for; without it, nothing."""
    polling.install()
    forking.install()
