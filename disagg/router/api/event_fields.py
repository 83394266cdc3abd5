"""What events of a stream add to an answer, field by field, in the shape of each API.

How tokens are cut into events differs from one answer to another; the fields, put together, do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Field: TypeAlias = tuple[Any, ...]
Json: TypeAlias = dict[str, Any]

# How an event says which answer it is of, and when that was begun.
_NAMES = ("id", "object", "created", "model", "system_fingerprint")
# Of a choice, what comes with its first event.
_ONCE = ("prompt_token_ids", "prompt_logprobs", "prompt_text")


@dataclass
class Piece:
    """What one event adds to one field: `words`, a text or a list, to be compared, and as long as
    what `holder` has under `name`. Without a holder, the event itself."""

    field: Field
    words: str | list[Any]
    holder: Json | None = None
    name: str = ""

    def drop(self, count: int) -> None:
        """Take out the first `count` words."""
        if self.holder is None:
            return
        rest = self.holder[self.name][count:]
        if rest or isinstance(rest, list) or self.name in ("text", "delta"):
            self.holder[self.name] = rest
        elif self.name == "finish_reason":
            self.holder[self.name] = None
        else:
            del self.holder[self.name]


def choices_of(content: Json) -> list[Json]:
    """Completions' and chats' choices that this event adds to."""
    choices = content.get("choices")
    return choices if isinstance(choices, list) else []


def of_choice(choice: Json) -> Iterator[Piece]:
    """What an event adds to a choice."""
    if isinstance(choice.get("text"), str):
        yield Piece(("text",), choice["text"], choice, "text")
    delta = choice.get("delta")
    if isinstance(delta, dict):
        yield from _texts(delta, ())
        for call in delta.get("tool_calls") or ():
            if isinstance(function := call.get("function"), dict):
                yield from _texts(function, ("call", call.get("index")))
    if isinstance(logprobs := choice.get("logprobs"), dict):
        yield from _logprobs(logprobs)
    if isinstance(ids := choice.get("token_ids"), list):
        yield Piece(("token_ids",), ids, choice, "token_ids")
    if isinstance(choice.get("finish_reason"), str):
        yield Piece(("finish_reason",), choice["finish_reason"], choice, "finish_reason")


def of_event(content: Json) -> Iterator[Piece]:
    """What an event without choices adds: to a text, or itself."""
    kind, delta = content.get("type"), content.get("delta")
    place = (kind, content.get("output_index"), content.get("content_index"), content.get("index"))
    if isinstance(delta, str):  # responses
        yield Piece(place, delta, content, "delta")
        if isinstance(logprobs := content.get("logprobs"), list):
            yield Piece((*place, "logprobs"), _tokens(logprobs), content, "logprobs")
    elif kind == "content_block_delta" and isinstance(delta, dict):  # messages
        of_kind = (*place, delta.get("type"))
        yield from (piece for piece in _texts(delta, of_kind) if piece.name != "type")
    else:
        what = content.get("item") or content.get("content_block") or {}
        yield Piece((*place, what.get("type"), what.get("name")), "!")


def tidied(choice: Json) -> None:
    """What is left of a choice whose beginning was taken out."""
    for name in _ONCE:
        if choice.get(name) is not None:
            choice[name] = None
    delta = choice.get("delta")
    calls = delta.get("tool_calls") if isinstance(delta, dict) else None
    if isinstance(delta, dict) and isinstance(calls, list):
        for call in calls:
            if "name" not in (call.get("function") or {}):  # a call is named once
                call.pop("id", None)
                call.pop("type", None)
        delta["tool_calls"] = [call for call in calls if call.get("function")]
        if not delta["tool_calls"]:
            del delta["tool_calls"]


def names_of(content: Json) -> Iterator[tuple[Field, str]]:
    """Names that responses draw anew for each answer, by where they stand."""
    if isinstance(response := content.get("response"), dict):
        yield ("response",), str(response.get("id"))
    item = content.get("item")
    if isinstance(item, dict):
        for name in ("id", "call_id"):
            if isinstance(item.get(name), str):
                yield (content.get("output_index"), name), item[name]


def answer_of(content: Json) -> Json:
    """By what an event says which answer it is of, and when that was begun."""
    names = {name: content[name] for name in _NAMES if name in content}
    if isinstance(response := content.get("response"), dict) and "created_at" in response:
        names["created_at"] = response["created_at"]
    return names


def belongs_to(content: Json, answer: Json) -> None:
    """Have the event say that it is of this answer."""
    content.update((name, value) for name, value in answer.items() if name in content)
    if isinstance(response := content.get("response"), dict) and "created_at" in answer:
        response["created_at"] = answer["created_at"]


def _texts(holder: Json, place: Field) -> Iterator[Piece]:
    for name, value in list(holder.items()):
        if isinstance(value, str):
            yield Piece((*place, name), value, holder, name)


def _logprobs(logprobs: Json) -> Iterator[Piece]:
    """Numbers may differ in their last digits; their tokens may not."""
    for name, value in logprobs.items():
        if not isinstance(value, list):
            continue
        is_of_tokens = name in ("content", "tokens")
        words = _tokens(value) if is_of_tokens else [None] * len(value)
        yield Piece(("logprobs", name), words, logprobs, name)


def _tokens(logprobs: list[Any]) -> list[Any]:
    return [one.get("token") if isinstance(one, dict) else one for one in logprobs]
