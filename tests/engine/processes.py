"""The processes of an engine."""

from __future__ import annotations

import psutil

from disagg.testing.vllm_server import VllmServer


def core_of(engine: VllmServer) -> psutil.Process:
    """The one that schedules, and computes."""
    assert engine.process is not None
    children = psutil.Process(engine.process.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))
