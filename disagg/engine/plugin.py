"""What vLLM calls in each of its processes, as a general plugin (see pyproject.toml)."""

from __future__ import annotations

from disagg.engine import ending, forking, hybrids, polling, reserving, rotations, seeds


def install() -> None:
    """Do what the environment asks for, have engines leave our connector its memory, and mend
    what keeps vLLM's workers from ending, ends them, or has them answer wrong."""
    polling.install()
    forking.install()
    reserving.install()
    ending.install()
    seeds.install()
    hybrids.install()
    rotations.install()
