"""The fields of an answer that each event of a stream extends, for each API.

Two streams of the same answer may split its tokens into events differently. Their fields, once
concatenated, are equal. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

Field: TypeAlias = tuple[Any, ...]
Json: TypeAlias = dict[str, Any]

# The fields by which an event names its answer and its creation time.
_NAMES = ("id", "object", "created", "model", "system_fingerprint")
# Fields of a choice that only its first event has.
_ONCE = ("prompt_token_ids", "prompt_logprobs", "prompt_text")


@dataclass
class Piece:
    """The part of one field that one event adds. `words`: a text or a list, to be compared. It is
    as long as the value of `holder` under `name`. Without holder, the piece is the whole event."""

    field: Field
    words: str | list[Any]
    holder: Json | None = None
    name: str = ""

    def drop(self, count: int) -> None:
        """Remove the first `count` words from the event."""
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
    """The choices of a completion or chat that this event extends."""
    choices = content.get("choices")
    return choices if isinstance(choices, list) else []


def of_choice(choice: Json) -> Iterator[Piece]:
    """The pieces that an event adds to a choice."""
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
    """The pieces of an event without choices: parts of a text, or the event itself."""
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
        item = content.get("item") or content.get("content_block") or {}
        yield Piece((*place, item.get("type"), item.get("name")), "!")


def tidied(choice: Json) -> None:
    """Clean up a choice from which the beginning was removed."""
    for name in _ONCE:
        if choice.get(name) is not None:
            choice[name] = None
    delta = choice.get("delta")
    calls = delta.get("tool_calls") if isinstance(delta, dict) else None
    if isinstance(delta, dict) and isinstance(calls, list):
        for call in calls:
            if "name" not in (call.get("function") or {}):  # not the call's first event
                call.pop("id", None)
                call.pop("type", None)
        delta["tool_calls"] = [call for call in calls if call.get("function")]
        if not delta["tool_calls"]:
            del delta["tool_calls"]


def names_of(content: Json) -> Iterator[tuple[Field, str]]:
    """The ids that the Responses API generates for each answer, by their place."""
    if isinstance(response := content.get("response"), dict):
        yield ("response",), str(response.get("id"))
    item = content.get("item")
    if isinstance(item, dict):
        for name in ("id", "call_id"):
            if isinstance(item.get(name), str):
                yield (content.get("output_index"), name), item[name]


def answer_of(content: Json) -> Json:
    """The fields by which an event names its answer and its creation time."""
    names = {name: content[name] for name in _NAMES if name in content}
    if isinstance(response := content.get("response"), dict) and "created_at" in response:
        names["created_at"] = response["created_at"]
    return names


def belongs_to(content: Json, answer: Json) -> None:
    """Make the event name this answer."""
    content.update((name, value) for name, value in answer.items() if name in content)
    if isinstance(response := content.get("response"), dict) and "created_at" in answer:
        response["created_at"] = answer["created_at"]


def _texts(holder: Json, place: Field) -> Iterator[Piece]:
    for name, value in list(holder.items()):
        if isinstance(value, str):
            yield Piece((*place, name), value, holder, name)


def _logprobs(logprobs: Json) -> Iterator[Piece]:
    """Only the tokens are compared: the numbers may differ in their last digits."""
    for name, value in logprobs.items():
        if not isinstance(value, list):
            continue
        is_of_tokens = name in ("content", "tokens")
        words = _tokens(value) if is_of_tokens else [None] * len(value)
        yield Piece(("logprobs", name), words, logprobs, name)


def _tokens(logprobs: list[Any]) -> list[Any]:
    return [one.get("token") if isinstance(one, dict) else one for one in logprobs]
