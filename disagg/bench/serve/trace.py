"""The load of `disagg bench serve`: times of requests, lengths of prompts and answers.

Made from a seed, or read from a file with one JSON object per line:

    {"at": 1.25, "prompt_tokens": 2000, "output_tokens": 64}

`at`: seconds from the start. A line may have `same_as`, the number (from 0) of an earlier line
whose prompt it repeats; without it no prompt comes twice. Files have lengths only; the tokens are
random and made here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from disagg.errors import ConfigError

_EXAMPLE = '{"at": 1.25, "prompt_tokens": 2000, "output_tokens": 64}'
TOKENS = range(300, 1000)
"""Ids that are in every vocabulary that `make-model` writes, and none of them special."""


@dataclass(frozen=True)
class Kind:
    """A kind of request, and its share of all requests."""

    share: float
    prompt_tokens: int
    output_tokens: int


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. `at`: seconds from the start of the load."""

    at: Annotated[float, msgspec.Meta(ge=0)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1)]
    same_as: Annotated[int, msgspec.Meta(ge=0)] | None = None


_decode_ask = msgspec.json.Decoder(Ask).decode


def parse_mix(text: str) -> list[Kind]:
    """The kinds of `SHARE:PROMPT:OUTPUT,…`. Raises `ConfigError`."""
    kinds = []
    for part in text.split(","):
        try:
            share, prompt, output = part.split(":")
            kind = Kind(float(share), int(prompt), int(output))
        except ValueError:
            raise ConfigError(
                f"--mix: {part!r} — write SHARE:PROMPT:OUTPUT, e.g. 0.7:128:64, comma-separated"
            ) from None
        if min(kind.prompt_tokens, kind.output_tokens) < 1 or not 0 < kind.share <= 1:
            raise ConfigError(
                f"--mix: {part!r} — the share must be above 0, and the lengths at least 1"
            )
        kinds.append(kind)
    total = sum(kind.share for kind in kinds)
    if not math.isclose(total, 1, abs_tol=1e-6):
        raise ConfigError(f"--mix: the shares add up to {total:g}; they must add up to 1")
    return kinds


def poisson(
    kinds: Sequence[Kind], rate: float, duration_s: float, seed: int, repeat_share: float = 0.0
) -> list[Ask]:
    """Arrivals of a Poisson process of `rate` requests a second, until `duration_s`.

    The same seed gives the same requests in the same order at every rate, only closer together.
    `repeat_share`: share of requests that repeat an earlier prompt of their kind, if there is one.
    """
    generator = random.Random(seed)
    shares = [kind.share for kind in kinds]
    firsts: dict[int, list[int]] = {}
    asks: list[Ask] = []
    at = 0.0
    while True:
        # The same number of draws per request, whether they are used or not.
        at += generator.expovariate(1.0) / rate
        (kind,) = generator.choices(kinds, shares)
        repeats, which = generator.random() < repeat_share, generator.random()
        if at >= duration_s:
            return asks
        known = firsts.setdefault(kind.prompt_tokens, [])
        same_as = known[int(which * len(known))] if repeats and known else None
        if same_as is None:
            known.append(len(asks))
        asks.append(Ask(round(at, 6), kind.prompt_tokens, kind.output_tokens, same_as))


def prompts(asks: Sequence[Ask], key: str) -> list[list[int]]:
    """Token ids for each request; another key gives other tokens."""
    generator = random.Random(key)
    made: list[list[int]] = []
    for ask in asks:
        if ask.same_as is None:
            made.append(generator.choices(TOKENS, k=ask.prompt_tokens))
        else:
            made.append(made[ask.same_as])
    return made


def write(path: Path, asks: Sequence[Ask]) -> None:
    """One JSON object per line."""
    path.write_bytes(b"".join(msgspec.json.encode(ask) + b"\n" for ask in asks))


def read(path: Path) -> list[Ask]:
    """The requests of a file, sorted by time. Raises `ConfigError`, which names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace: {path} cannot be read ({error.strerror})") from error
    asks: list[Ask] = []
    for number, line in enumerate(lines):
        try:
            ask = _decode_ask(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--trace: {path}:{number + 1}: {error}; example of a line: {_EXAMPLE}"
            ) from error
        if problem := _problem(ask, asks):
            raise ConfigError(f"--trace: {path}:{number + 1}: {problem}")
        asks.append(ask)
    if not asks:
        raise ConfigError(f"--trace: {path} is empty; example of a line: {_EXAMPLE}")
    return asks


def _problem(ask: Ask, earlier: Sequence[Ask]) -> str | None:
    if earlier and ask.at < earlier[-1].at:
        return "at: earlier than the line before; sort the lines by it"
    if ask.same_as is None:
        return None
    if ask.same_as >= len(earlier):
        return f"same_as: {ask.same_as} — name an earlier line, from 0"
    length = earlier[ask.same_as].prompt_tokens
    if length != ask.prompt_tokens:
        return f"prompt_tokens: {ask.prompt_tokens} — the prompt of same_as has {length}"
    return None
