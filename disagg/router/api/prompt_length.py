"""What a prompt looks like without a tokenizer: its length in tokens, and keys of its prefixes.

Lists of token ids are counted exactly; of text, four characters are taken for a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, TypeGuard

import xxhash

_CHARS_PER_TOKEN = 4
CHUNK_TOKENS = 128
_CHUNK_CHARS = CHUNK_TOKENS * _CHARS_PER_TOKEN
_MOST_CHUNKS = 64


def tokens(body: dict[str, Any]) -> int:
    """About how many tokens the prompt has."""
    return sum(_length(part) for part in _parts(body))


def prefix_keys(body: dict[str, Any]) -> list[int]:
    """One key per leading chunk of the prompt, whatever its parts, shortest prefix first; equal
    prefixes have equal keys. Only of the prompt's first 8,192 tokens."""
    keys: list[int] = []
    digest = xxhash.xxh3_64(str(body.get("model")).encode(errors="replace"))
    room = _CHUNK_CHARS
    for part in _parts(body):
        chars, at = 1 if isinstance(part, str) else _CHARS_PER_TOKEN, 0
        while at < len(part):
            end = at + max(1, room // chars)
            piece = part[at:end]
            digest.update(_bytes(piece))
            at, room = end, room - chars * len(piece)
            if room <= 0:
                keys.append(digest.intdigest())
                room = _CHUNK_CHARS
                if len(keys) == _MOST_CHUNKS:
                    return keys
    return [*keys, digest.intdigest()] if room < _CHUNK_CHARS else keys


def is_tokens(prompt: Any) -> TypeGuard[list[int]]:
    """Whether it is one prompt as token ids, by its first one: what is mixed no engine takes."""
    return isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int))


def _parts(body: dict[str, Any]) -> Iterator[str | list[int]]:
    """Texts and token lists in their order; whatever else there is in a body is left out."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or is_tokens(prompt):
        yield prompt
    else:
        yield from (p for p in _several(prompt) if isinstance(p, str))
    for key in ("system", "instructions"):
        yield from _texts(body.get(key))
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        yield messages
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        yield f"\0{message.get('role')}\0"
        yield from _texts(message.get("content"))


def _texts(content: Any) -> Iterator[str]:
    """Of a text, or of parts that have one."""
    for piece in _several(content):
        text = piece.get("text") if isinstance(piece, dict) else piece
        if isinstance(text, str):
            yield text


def _several(one_or_more: Any) -> list[Any]:
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def _length(part: str | list[int]) -> int:
    return len(part) if isinstance(part, list) else -(-len(part) // _CHARS_PER_TOKEN)


def _bytes(part: str | list[int]) -> bytes:
    if isinstance(part, str):
        return part.encode(errors="surrogatepass")
    try:
        return array("q", part).tobytes()
    except (OverflowError, TypeError):
        return repr(part).encode()
