"""Our log lines inside an engine, where vLLM decides what is shown."""

from __future__ import annotations

import logging


def log_as_vllm_does() -> None:
    """vLLM sets up its own logger alone; without handlers our lines would be lost."""
    ours, theirs = logging.getLogger("disagg"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
