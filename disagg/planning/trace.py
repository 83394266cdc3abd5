"""The load: arrival times of requests, and the lengths of their prompts and answers.

A load comes from a file (JSON lines or CSV), or is generated from a description. Arrivals can be
scaled to a rate. If a file has no arrivals, a seeded Poisson process makes them. A wrong line is
never repaired: the error names file, line and field.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from disagg.config_file import nearest, show
from disagg.errors import ConfigError

_SIZES = ("prompt_tokens", "output_tokens")
_KNOWN = {"at", "same_as", *_SIZES}
_EXAMPLE = '{"at": 0.5, "prompt_tokens": 800, "output_tokens": 100}'


@dataclass(frozen=True)
class Trace:
    """Requests in the order of arrival. at: seconds after the first one. prompt, output: tokens."""

    at: Sequence[float]
    prompt: Sequence[int]
    output: Sequence[int]
    origin: str

    def __len__(self) -> int:
        return len(self.at)

    @property
    def rate(self) -> float:
        """Requests per second; infinite if all arrive at once."""
        if len(self) < 2 or self.at[-1] <= 0:
            return math.inf
        return (len(self) - 1) / self.at[-1]


@dataclass(frozen=True)
class _Row:
    place: str
    at: float | None
    prompt: int
    output: int


def read(path: Path, rate: float | None, seed: int) -> Trace:
    """A file's requests. `rate` (requests per second) scales the arrivals, or makes them if the
    file has none. Raises ConfigError."""
    rows = list(_csv_rows(path) if path.suffix == ".csv" else _json_rows(path))
    if not rows:
        raise ConfigError(f"{path}: no requests; write lines like {_EXAMPLE}")
    timed = [row for row in rows if row.at is not None]
    if timed and len(timed) < len(rows):
        odd = next(row for row in rows if (row.at is None) == (rows[0].at is not None))
        raise ConfigError(
            f"{odd.place}: at: {'missing' if odd.at is None else 'given'}, unlike in the lines "
            "before; give it on every line, or on no line and set --rate"
        )
    if not timed:
        if rate is None:
            raise ConfigError(f"{path}: at: on no line; set --rate to the requests per second")
        at = _poisson(len(rows), rate, seed)
        origin = f"{path}, arrivals: Poisson, {rate:g} a second, seed {seed}"
    else:
        rows.sort(key=lambda row: row.at or 0.0)
        at, origin = _scaled(path, [row.at or 0.0 for row in rows], rate)
    return Trace(at, [row.prompt for row in rows], [row.output for row in rows], origin)


def synthetic(text: str, rate: float | None, seed: int) -> Trace:
    """Requests generated from a description, `requests=N,prompt=MEAN,output=MEAN[,sigma=S]`.

    Sizes are log-normal with these means; `sigma` is that of their logarithm (default 0: all sizes
    equal). Arrivals are Poisson at `rate` requests per second. Raises ConfigError.
    """
    values = {"sigma": 0.0}
    known = ("requests", "prompt", "output", "sigma")
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in known:
            raise ConfigError(f"--synthetic: {name}: unknown; {nearest(name, known)}")
        values[name] = _positive(f"--synthetic: {name}", value, zero=name == "sigma")
    if missing := [name for name in known if name not in values]:
        raise ConfigError(
            f"--synthetic: {missing[0]}: missing; write requests=10000,prompt=1000,output=200"
        )
    if rate is None:
        raise ConfigError("--rate: missing; --synthetic needs the requests per second")
    random = np.random.default_rng([seed, 1])
    count, sigma = math.ceil(values["requests"]), values["sigma"]

    def sizes(mean: float) -> list[int]:
        drawn = random.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
        whole: list[int] = np.maximum(1, np.rint(drawn)).astype(int).tolist()
        return whole

    origin = f"made: {text}; arrivals: Poisson, {rate:g} a second, seed {seed}"
    prompt, output = sizes(values["prompt"]), sizes(values["output"])
    return Trace(_poisson(count, rate, seed), prompt, output, origin)


def _poisson(count: int, rate: float, seed: int) -> list[float]:
    gaps = np.random.default_rng([seed, 0]).exponential(1 / rate, count)
    gaps[0] = 0.0
    at: list[float] = np.cumsum(gaps).tolist()
    return at


def _scaled(path: Path, at: list[float], rate: float | None) -> tuple[list[float], str]:
    at = [time - at[0] for time in at]
    if rate is None:
        return at, str(path)
    if at[-1] <= 0:
        raise ConfigError(
            f"{path}: at: equal on all lines; remove it, and --rate makes the arrivals"
        )
    factor = (len(at) - 1) / at[-1] / rate
    return [time * factor for time in at], f"{path}, arrivals scaled to {rate:g} a second"


def _json_rows(path: Path) -> Iterator[_Row]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{place}: not JSON ({error}); write {_EXAMPLE}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{place}: not a JSON object; write {_EXAMPLE}")
        yield _row(place, fields)


def _csv_rows(path: Path) -> Iterator[_Row]:
    reader = csv.DictReader(_text(path).splitlines())
    for fields in reader:
        place = f"{path}:{reader.line_num}"
        if None in fields or None in fields.values():
            raise ConfigError(f"{place}: not as many fields as the header; give one per column")
        yield _row(place, {name.strip(): _number(value) for name, value in fields.items()})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8") from error


def _number(text: str) -> Any:
    """A CSV field as a JSON value; None if it is empty."""
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        return text


def _row(place: str, fields: dict[str, Any]) -> _Row:
    if strange := sorted(set(fields) - _KNOWN):
        raise ConfigError(f"{place}: {strange[0]}: unknown; {nearest(strange[0], _KNOWN)}")
    sizes = []
    for name in _SIZES:
        size = fields.get(name)
        if size is None:
            raise ConfigError(f"{place}: {name}: missing; set it to a number of tokens")
        if type(size) is not int or size < 1:
            raise ConfigError(f"{place}: {name}: {show(size)} — must be a whole number, 1 or more")
        sizes.append(size)
    at = fields.get("at")
    if at is not None and not (type(at) in (int, float) and 0 <= at < math.inf):
        raise ConfigError(f"{place}: at: {show(at)} — must be seconds, 0 or more")
    return _Row(place, None if at is None else float(at), *sizes)


def _positive(place: str, text: str, *, zero: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf or (zero and value == 0)):
        raise ConfigError(f"{place}: {show(text)} — must be a number, more than 0")
    return value
