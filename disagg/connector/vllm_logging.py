"""Sends our log lines inside an engine to vLLM's log handlers."""

from __future__ import annotations

import logging


def log_as_vllm_does() -> None:
    """vLLM configures only its own logger; without handlers our lines would be lost."""
    ours, theirs = logging.getLogger("disagg"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
