"""Sizes and times of the YAML: plain numbers, or numbers with a unit, such as 64MiB and 30s."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_BYTES = {
    "B": 1,
    **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", 1)},
}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def _read(units: Mapping[str, float], example: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        """The number of bytes or seconds. What is no text is judged as any number."""
        if not isinstance(value, str):
            return value
        found = _QUANTITY.fullmatch(value)
        if found is None or found[2] not in units:
            raise ValueError(
                f"must be a number, or a number with a unit ({', '.join(units)}), such as {example}"
            )
        amount = float(found[1]) * units[found[2]]
        return int(amount) if amount.is_integer() else amount

    return read


def _schema(kind: str, units: Mapping[str, float]) -> WithJsonSchema:
    pattern = rf"^\s*\d+(\.\d+)?\s*({'|'.join(units)})\s*$"
    return WithJsonSchema({"anyOf": [{"type": kind}, {"type": "string", "pattern": pattern}]})


Bytes = Annotated[int, BeforeValidator(_read(_BYTES, "64MiB")), _schema("integer", _BYTES)]
Seconds = Annotated[float, BeforeValidator(_read(_SECONDS, "30s")), _schema("number", _SECONDS)]
