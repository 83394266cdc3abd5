"""Figures of a results file as people read them: numbers, cells, the machine."""

from __future__ import annotations

import math

from disagg.bench.results import Cell, Machine, Row, Target

DIGITS = 3
EXACT_DIGITS = 4  # of targets: a rounded figure must not look as if it met its limit


def cell(value: Cell) -> str:
    """A cell of a table. A float has three significant digits, an integer all of its own."""
    match value:
        case None:
            return ""
        case float():
            return number(value, DIGITS)
        case int():
            return f"{value:,}"
    return value


def number(value: float, digits: int) -> str:
    """With so many significant digits, and without zeros at the end."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def target_row(one: Target, *, missed: str = "missed") -> Row:
    """A target as a row. `missed`: the verdict of one that is not met."""
    return {
        "target": one.name,
        "at": one.at,
        "limit": one.limit,
        "measured": number(one.measured, EXACT_DIGITS),
        "verdict": "met" if one.met else missed,
    }


def described(where: Machine) -> str:
    """The processor, cores, memory, kernel and GPUs, as far as they are known."""
    parts = [where.cpu]
    if where.cpu_features:
        parts[0] += f" ({', '.join(where.cpu_features)})"
    if where.cores:
        parts.append(f"{where.cores} cores")
    if where.memory_gib:
        parts.append(f"{where.memory_gib:g} GiB")
    parts += [where.kernel] if where.kernel else []
    if len(parts) == 1 and not where.gpus:
        return where.cpu  # nothing else is known, so neither whether it has a GPU
    return ", ".join([*parts, *(where.gpus or ["no GPU"])])
