"""Reads an engine's log: its tail, the stage of its start, and why it failed.

Never writes the log. It recognises vLLM's wording, so an unknown line must never be an error: the
stage then stays the one before.
"""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 256 << 10
RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # for Ray's own log monitor

_LONGEST = 300  # characters; vLLM's error for an unknown model lists all models
# Errors whose text is enough without their type.
PLAIN = ("EngineDied", "FileNotFoundError", "OSError", "ValidationError", "ValueError")

# The stages of a start, in order, with the text that vLLM 0.32 prints when each begins.
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

# Each line of a trace begins with "(EngineCore pid=12) ERROR 11-20 22:00:00 [core.py:866] ".
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?([A-Z]+\s+\d\d-\d\d [\d:]+ \[[^\]]*\]\s?)?")
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|NotFound))\b:? ?(.*)")
# Errors of vLLM's outer processes that only report an error of an inner process.
_RELAYED = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
    "Worker failed with error",
    "vLLM's engine process died",
    "cancelled",
)
# What vLLM's processes write when an error ends them. Other errors in the log of an engine that
# served are of requests.
_FATAL = (
    "EngineCore encountered a fatal error",
    "EngineCore failed to start",
    "WorkerProc hit an exception",
    "Fatal Python error",
)
_DEATHS = re.compile(
    r"((?:\w+ proc \S+ )?died unexpectedly|exit ?code[:=]? ?-?\d+|Fatal Python error: .*)"
)


def tail(path: Path, lines: int) -> str:
    """The last `lines` lines of a log file; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    kept = [line for line in text.splitlines() if not line.startswith(RAY_MARKS)]
    return "\n".join(kept[-lines:])


def since(path: Path, after: int) -> tuple[str, int]:
    """The whole lines that a log file has after so many bytes, up to `TAIL_BYTES`, and the bytes
    before the next one. A log that has fewer is another one, of a later process."""
    after = after if after <= size(path) else 0
    try:
        with path.open("rb") as file:
            file.seek(after)
            found = file.read(TAIL_BYTES)
    except OSError:
        return "", after
    whole = found[: found.rfind(b"\n") + 1]
    lines = whole.decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith(RAY_MARKS)), after + len(whole)


def size(path: Path) -> int:
    """Bytes of a log file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def stage(log: str) -> str:
    """The stage of an engine's start, from its log so far."""
    return next(word for word, mark in reversed(STAGES) if mark in log)


def root_cause(log: str, *, served: bool = False) -> str | None:
    """The innermost error in the log of an engine that ended, in one line. `served`: whether it had
    served requests.

    vLLM's processes report a failure from the worker to the engine core to the server, each with a
    trace of its own. The first error that is not such a report is the cause; if the engine served,
    the first one from where a process wrote that it ends.
    """
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    if served:
        lines = lines[_end_of_service(lines) :]
    for position, line in enumerate(lines):
        match = _ERROR.match(line)
        if match and not is_relayed(line):
            return _one_line(match[1], match[2], lines[position + 1 : position + 4])
    deaths = [match[0] for line in lines if (match := _DEATHS.search(line))]
    return deaths[0] if deaths else None


def _end_of_service(lines: list[str]) -> int:
    """Where the lines about the death begin."""
    marks = (number for number, line in enumerate(lines) if any(m in line for m in _FATAL))
    first = next(marks, None)
    if first is not None:
        return first
    deaths = (number for number, line in enumerate(lines) if _DEATHS.search(line))
    return next(deaths, len(lines))


def is_relayed(text: str) -> bool:
    """Whether an error only reports another error, which the log contains."""
    return any(mark in text for mark in _RELAYED)


def describe(error: BaseException) -> str:
    """An exception in one line. Types in `PLAIN` are left out."""
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
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"  # the log has the full text
