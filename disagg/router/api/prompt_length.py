"""How long a prompt is without a tokenizer, and keys of its prefixes.

Token ids are counted exactly. Of a text, the length follows from the kinds of its characters, with
weights that fit the tokenizers of today's models; the real lengths that engines report correct
them. Media count by their kind and size (`media_size.py`).
"""

from __future__ import annotations

import math
import string
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from disagg.config import MediaSection
from disagg.router.api import media_size
from disagg.router.api.prompt_parts import Mark, Media, Part

# Tokens for each byte of UTF-8 of a kind, as Tekken needs for prose, code, JSON and logs. Older
# tokenizers need up to a third more.
_LETTERS, _SPACES, _DIGITS, _CONTROLS, _OTHERS, _NOT_ASCII = 0.235, 0.1, 1.1, 1.0, 0.65, 0.26
_OF_LETTERS = string.ascii_letters.encode()
_OF_DIGITS = string.digits.encode()
_OF_CONTROLS = bytes(range(32))
_OF_NOT_ASCII = bytes(range(128, 256))

_UNIT = 4
"""Units of one token in `Prefixes`: about its characters."""
_CHUNK = 128 * _UNIT
_GROWS_AT = 256
"""Chunks of this size until so many; then each is a 256th of what lies before it."""

_LEAST_LEARNED = 256  # tokens; of shorter prompts a template's fixed text says too much
_SCALES = 64  # models whose scale is kept
_DECAY = 0.9
_MOST_SCALE = 4.0


@dataclass(frozen=True, slots=True)
class Length:
    """Of one prompt, in tokens: `exact` of token ids, `text` estimated without any correction,
    `media` as the settings say."""

    exact: int = 0
    text: float = 0.0
    media: int = 0


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`keys`: one for each leading chunk of the prompt, shortest prefix first; equal prefixes have
    equal keys. `shares`: how much of the prompt each of them is, up to 1."""

    keys: Sequence[int]
    shares: Sequence[float]

    def known(self, count: int) -> float:
        """The share of the prompt that the first `count` keys stand for."""
        return self.shares[count - 1] if count else 0.0


def measure(parts: Sequence[Part], media: MediaSection) -> Length:
    """How long these parts are."""
    exact = of_media = 0
    text = 0.0
    for part in parts:
        if isinstance(part, list):
            exact += len(part)
        elif isinstance(part, Media):
            of_media += media_size.tokens(part, media)
        elif isinstance(part, Mark):
            text += part.tokens
        else:
            text += _text_tokens(part)
    return Length(exact, text, of_media)


def prefixes(shape: bytes, parts: Sequence[Part], media: MediaSection) -> Prefixes:
    """Keys of the prompt's prefixes, whatever its parts. `shape`: see `prompt_parts.shape`."""
    digest = xxhash.xxh3_64(shape)
    keys: list[int] = []
    ends: list[int] = []
    room = step = _CHUNK
    done = 0  # units before the chunk under way

    def end_chunk() -> None:
        nonlocal room, step, done
        done += step
        keys.append(digest.intdigest())
        ends.append(done)
        room = step = max(_CHUNK, done // _GROWS_AT)

    for part in parts:
        if isinstance(part, Mark):
            digest.update(f"\0{part.name}\0".encode(errors="replace"))
            left = part.tokens * _UNIT
        elif isinstance(part, Media):
            digest.update(xxhash.xxh3_64_digest(_utf8(part.source)))
            left = media_size.tokens(part, media) * _UNIT
        else:
            units, at = _UNIT if isinstance(part, list) else 1, 0
            while at < len(part):
                end = at + max(1, room // units)
                piece = part[at:end]
                digest.update(_bytes(piece))
                at, room = end, room - units * len(piece)
                if room <= 0:
                    end_chunk()
            continue
        while left >= room:  # it has no inner ends: a longer piece of it has another key
            left -= room
            end_chunk()
            digest.update(b"\0")
        room -= left
    if room < step:
        keys.append(digest.intdigest())
        ends.append(done + step - room)
    whole = ends[-1] if ends else 1
    return Prefixes(keys, [end / whole for end in ends])


class Scales:
    """How real lengths relate to the estimates, by model, as engines reported them lately."""

    def __init__(self) -> None:
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def tokens(self, length: Length, model: Any) -> int:
        """The corrected length, in tokens, rounded up."""
        if not length.text:
            return length.exact + length.media
        estimated, real = self._sums.get(str(model), (1.0, 1.0))
        return length.exact + length.media + math.ceil(length.text * real / estimated)

    def learn(self, length: Length, model: Any, reported: int) -> None:
        """An engine of this model reported so many tokens for a prompt of this length."""
        real = reported - length.exact
        if length.media or length.text < _LEAST_LEARNED or real <= 0:
            return
        scale = min(max(real / length.text, 1 / _MOST_SCALE), _MOST_SCALE)
        estimated, before = self._sums.get(str(model), (0.0, 0.0))
        self._sums[str(model)] = (
            estimated * _DECAY + length.text,
            before * _DECAY + length.text * scale,
        )
        self._sums.move_to_end(str(model))
        while len(self._sums) > _SCALES:
            self._sums.popitem(last=False)


def _text_tokens(text: str | bytes) -> float:
    data = text if isinstance(text, bytes) else _utf8(text)
    rest = data.translate(None, _OF_LETTERS)
    tokens = (len(data) - len(rest)) * _LETTERS
    for weight, of_kind in (
        (_SPACES, b" "),
        (_DIGITS, _OF_DIGITS),
        (_CONTROLS, _OF_CONTROLS),
        (_NOT_ASCII, _OF_NOT_ASCII),
    ):
        before = len(rest)
        if not before:
            break
        rest = rest.translate(None, of_kind)
        tokens += (before - len(rest)) * weight
    return tokens + len(rest) * _OTHERS


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _bytes(part: str | bytes | list[int]) -> bytes:
    if isinstance(part, str):
        return _utf8(part)
    if isinstance(part, bytes):
        return part
    try:
        return array("q", part).tobytes()
    except (OverflowError, TypeError):
        return repr(part).encode()
