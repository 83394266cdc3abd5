"""Which model a request names that is passed on as it is. Pure functions.

A body is not decoded for this: all but its few fields that count are skipped. The engine checks the
name again, so a body that it reads in another way gets its own refusal.
"""

from __future__ import annotations

from email.message import Message
from urllib.parse import parse_qs

import msgspec

_LONGEST_VALUE = 1024  # bytes of a form's field


class _Body(msgspec.Struct):
    # Strings alone: of anything else, however large, not even the first value is decoded.
    model: str | None = None
    lora_name: str | None = None


_BODIES = msgspec.json.Decoder(_Body)


def named(data: bytes, content_type: str, query: bytes) -> str | None:
    """The model that the body (JSON or a multipart form) names, or else the query's; None if no
    model is named."""
    model: str | None = None
    if data:
        boundary = _boundary(content_type)
        model = _field(data, boundary) if boundary else _read(data).model
    return model if model is not None else _of_query(query)


def adapter(data: bytes) -> str | None:
    """The `lora_name` of a JSON body; None without one."""
    return _read(data).lora_name


def _read(data: bytes) -> _Body:
    try:
        return _BODIES.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _Body()


def _of_query(query: bytes) -> str | None:
    if b"model" not in query:
        return None
    values = parse_qs(query.decode("latin-1")).get("model")
    return values[0] if values else None


def _boundary(content_type: str) -> str | None:
    if not content_type.lower().startswith("multipart/form-data"):
        return None
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_boundary()
    return str(boundary) if boundary else None


def _field(data: bytes, boundary: str) -> str | None:
    """The field `model` of a form."""
    for part in data.split(b"--" + boundary.encode("latin-1", "replace")):
        head, found, value = part.partition(b"\r\n\r\n")
        if found and _name_of(head) == "model":
            return value[:_LONGEST_VALUE].removesuffix(b"\r\n").decode(errors="replace")
    return None


def _name_of(head: bytes) -> str | None:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            disposition = Message()
            disposition["content-disposition"] = value.strip().decode("latin-1")
            name = disposition.get_param("name", header="content-disposition")
            return name if isinstance(name, str) else None
    return None
