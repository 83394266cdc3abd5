"""What of a request's body reaches the prompt, part by part, in the order of common templates.

All four APIs are read by one rule: what stands in a message, a tool or an input item is a part,
unless its field is known to stay outside the prompt. So a field that is new counts, too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import msgspec


class Kind(enum.StrEnum):
    """Media that a model reads as tokens."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Media:
    """One image, recording, video or file. `source`: a URL, base64, or a name that stands for it;
    it makes the media's identity."""

    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What a template writes around a message, a tool call or a list of tools. `tokens`: about how
    many."""

    name: str
    tokens: int = 6


Part: TypeAlias = str | list[int] | bytes | Media | Mark
"""Text, token ids, text as UTF-8, media, or a mark."""

_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_embeds", "image_pil"), Kind.IMAGE),
    "image_generation_call": Kind.IMAGE,
    **dict.fromkeys(("audio_url", "input_audio", "audio", "audio_embeds"), Kind.AUDIO),
    **dict.fromkeys(("video_url", "input_video", "video"), Kind.VIDEO),
    **dict.fromkeys(("file", "input_file", "document", "file_url"), Kind.FILE),
}
# Where a part of media has its bytes or its address, by preference.
_SOURCES = (
    "url",
    "data",
    "result",
    "file_data",
    "image_url",
    "file_url",
    "file_id",
    "filename",
    "uuid",
)
_NOT_SOURCES = ("type", "detail", "format", "media_type", "cache_control", "title", "context")
# Fields of messages, items and blocks that no template writes.
_OUTSIDE = frozenset(
    [
        "annotations",
        "cache_control",
        "call_id",
        "citations",
        "encrypted_content",
        "id",
        "index",
        "logprobs",
        "prefix",
        "role",
        "signature",
        "status",
        "tool_call_id",
        "tool_use_id",
        "type",
        "uuid",
    ]
)
# Their values are JSON in the prompt; whatever else is an object holds parts.
_JSON = frozenset(["input", "arguments", "parameters", "input_schema", "action"])
_TOOLS = ("tools", "functions", "documents")
# What changes a prompt's KV from its first token on.
_SHAPE = (
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "reasoning_effort",
)
_NO_PARTS = ("redacted_thinking", "item_reference")
_CALLS = ("function", "tool_use", "function_call", "custom_tool_call")
_DEEPEST = 32  # of parts within parts; nobody nests that deep
_encode = msgspec.json.Encoder().encode


def shape(body: Mapping[str, Any]) -> bytes:
    """What all of the prompt depends on, besides its parts."""
    fields = {name: body[name] for name in _SHAPE if name in body}
    return f"{body.get('model')}\0".encode(errors="replace") + (_json(fields) if fields else b"")


def parts(body: Mapping[str, Any]) -> Iterator[Part]:
    """The parts of the prompt. Never raises: what is malformed is left to the engine."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or is_tokens(prompt):
        yield prompt
    elif isinstance(prompt, list):
        for one in prompt:
            if isinstance(one, str) or is_tokens(one):
                yield one
    for field in ("system", "instructions"):
        if body.get(field):
            yield Mark(field)
            yield from _inner(body[field])
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        yield Mark("user")
        yield messages
    listed = messages if isinstance(messages, list) else []
    first = _leading(listed)
    yield from _messages(listed[:first])
    yield from _tools(body)
    yield from _messages(listed[first:])


def is_tokens(prompt: Any) -> TypeGuard[list[int]]:
    """Whether it is one prompt as token ids, by its first one: what is mixed no engine takes."""
    return isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int))


def _leading(messages: list[Any]) -> int:
    """How many messages stand before the tools: those of the system."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return number
    return len(messages)


def _tools(body: Mapping[str, Any]) -> Iterator[Part]:
    for field in _TOOLS:
        listed = body.get(field)
        if isinstance(listed, list) and listed:
            # Templates explain how to call a tool in some fifty words.
            yield Mark(field, 64)
            for one in listed:
                yield _json(one)


def _messages(messages: list[Any]) -> Iterator[Part]:
    for message in messages:
        if isinstance(message, dict):
            yield Mark(str(message.get("role") or message.get("type")))
            yield from _inner(message)


def _inner(value: Any, depth: int = 0) -> Iterator[Part]:
    """The parts of a message's field: a text, an object, or several."""
    if isinstance(value, str):
        if value:
            yield value
    elif depth > _DEEPEST:
        yield _json(value)
    elif isinstance(value, list):
        for one in value:
            yield from _inner(one, depth + 1)
    elif isinstance(value, dict):
        yield from _object(value, depth)


def _object(value: dict[str, Any], depth: int) -> Iterator[Part]:
    kind = value.get("type")
    if kind in _NO_PARTS:
        return
    text = _as_text(value)
    if text is not None:
        yield from _inner(text, depth + 1)
        return
    media = _media(value)
    if media is not None:
        yield media
        return
    if kind in _CALLS:
        yield Mark("call", 12)
    for name, inner in value.items():
        if name in _OUTSIDE:
            continue
        if name in _JSON and isinstance(inner, dict | list) and not _are_items(inner):
            yield _json(inner)
        else:
            yield from _inner(inner, depth + 1)


def _are_items(value: Any) -> bool:
    """Whether a tool's output is a list of texts and images, not any JSON."""
    return isinstance(value, list) and all(isinstance(one, dict) and "type" in one for one in value)


def _as_text(value: Mapping[str, Any]) -> Any:
    """The text of a part that is called a document, as the Messages API has it."""
    source = value.get("source")
    if value.get("type") != "document" or not isinstance(source, dict):
        return None
    return source.get("content") or (source.get("data") if source.get("type") == "text" else None)


def _media(value: Mapping[str, Any]) -> Media | None:
    """The media that a part of a message is, by its type or its field. A message has fields of
    these names too: SDKs send `audio: null` with every answer."""
    kind = _KINDS.get(str(value.get("type")))
    if kind is None and "role" not in value:
        kind = next((_KINDS[name] for name in value if name in _KINDS and value[name]), None)
    return None if kind is None else Media(kind, _source(value) or "")


def _source(value: Any) -> str | None:
    """The first string that says what the media are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        return None
    for name in (*_SOURCES, *value):
        if name not in _NOT_SOURCES:
            found = _source(value.get(name))
            if found:
                return found
    return None


def _json(value: Any) -> bytes:
    try:
        return _encode(value)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError):
        return repr(type(value)).encode()
