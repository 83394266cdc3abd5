"""Reads an engine's log: its tail, what the engine is doing, and why it failed.

Only looks; never writes the log. What it recognises is vLLM's wording, so an unknown line
must never be an error: the word for it is then simply the stage before.
"""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 256 << 10
RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # for Ray's own log monitor

# Errors whose text says all.
_LONGEST = 300  # vLLM lists all models that it knows
PLAIN = ("EngineDied", "FileNotFoundError", "OSError", "ValidationError", "ValueError")

# What vLLM 0.32 prints at the start of each stage, in the order of a start.
STAGES = (
    ("importing vLLM", ""),
    ("starting its processes", "Using max model len"),
    ("starting the worker", "Initializing a V1 LLM engine"),
    ("loading weights", "Starting to load model"),
    ("allocating the KV cache", "Model loading took"),
    ("allocating the KV cache", "Loading weights took"),
    ("warming up", "KV cache size"),
    ("compiling", "Compiling a graph"),
    ("capturing graphs", "Capturing CUDA graph"),
    ("starting the server", "Supported tasks"),
)

# "(EngineCore pid=12) ERROR 11-20 22:00:00 [core.py:866] " before each line of a trace.
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?([A-Z]+\s+\d\d-\d\d [\d:]+ \[[^\]]*\]\s?)?")
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|NotFound))\b:? ?(.*)")
# What vLLM's outer processes say about an error of an inner one.
_RELAYED = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
    "Worker failed with error",
    "vLLM's engine process died",
    "cancelled",
)
_DEATHS = re.compile(
    r"((?:\w+ proc \S+ )?died unexpectedly|exit ?code[:=]? ?-?\d+|Fatal Python error: .*)"
)


def tail(path: Path, lines: int) -> str:
    """The last `lines` lines of a log file; empty when it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    kept = [line for line in text.splitlines() if not line.startswith(RAY_MARKS)]
    return "\n".join(kept[-lines:])


def stage(log: str) -> str:
    """What a starting engine is doing, from its log so far."""
    return next(word for word, mark in reversed(STAGES) if mark in log)


def root_cause(log: str) -> str | None:
    """The innermost error in a log, in one line.

    vLLM's processes report a failure outwards (worker, engine core, server), each with a
    trace of its own; the first error that is not such a report is the real one.
    """
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    for position, line in enumerate(lines):
        match = _ERROR.match(line)
        if match and not is_relayed(line):
            return _one_line(match[1], match[2], lines[position + 1 : position + 4])
    deaths = [match[0] for line in lines if (match := _DEATHS.search(line))]
    return deaths[0] if deaths else None


def is_relayed(text: str) -> bool:
    """Whether an error only reports another one, which the log has."""
    return any(mark in text for mark in _RELAYED)


def describe(error: BaseException) -> str:
    """An exception in one line, without its type where the text says enough."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return _one_line(type(error).__name__, lines[0], lines[1:4])


def _one_line(kind: str, text: str, following: list[str]) -> str:
    if "validation error" in text:  # pydantic: the count first, the message on the lines after
        detail = " ".join(line.strip() for line in following if line.strip())
        text = re.sub(r"\s*\[type=.*", "", detail).removeprefix("Value error, ")
    line = text if kind in PLAIN else f"{kind}: {text}"
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"  # the log has it all
