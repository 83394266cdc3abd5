"""Streams that another engine repeats from the beginning; the client gets what it does not have.

Tokens do not continue every stream (`stream_state.py`): not tool calls, reasoning, grammars, stop
strings, penalties, log-probabilities, nor the newer APIs. But a greedy or seeded request, sent
again, gives the same answer. So the router keeps what it sent, and holds back as much of the new
answer. It compares both field by field (`event_fields.py`): a new answer that begins differently
ends in an error. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import msgspec

from disagg.router.api import event_fields
from disagg.router.api.errors import ApiError
from disagg.router.api.event_fields import Field, Json, Piece
from disagg.router.api.event_parser import END
from disagg.router.api.event_stream import DONE, Plain, content_of, failure_in, with_content
from disagg.router.api.paths import ENDS

_READ_AT = 64 << 10  # bytes of events that are kept as they are
Words: TypeAlias = str | list[Any]


class Sent:
    """What a client has of an answer: its fields, put together now and then."""

    def __init__(self) -> None:
        self._events: list[bytes] = []  # the latest
        self._size = 0
        self.answer: Json = {}
        self.names: dict[Field, str] = {}
        self.numbered = 0
        """How many events had a number of their own."""
        self._fields: dict[Any, dict[Field, list[Words]]] = {}

    def add(self, events: bytes) -> None:
        """These whole events were sent next."""
        self._events.append(events)
        self._size += len(events)
        if self._size > _READ_AT:
            self._read()

    def fields(self) -> dict[Any, dict[Field, Words]]:
        """Of each choice, by its index; None: of an answer that has no choices."""
        self._read()
        return {
            key: {field: words for field, (words,) in fields.items()}
            for key, fields in self._fields.items()
        }

    def _read(self) -> None:
        events, self._events, self._size = b"".join(self._events), [], 0
        for event in events.split(END)[:-1]:
            if (content := content_of(event)) is not None:
                self._add(content)
        for fields in self._fields.values():
            for parts in fields.values():
                parts[:] = [_joined(parts)]

    def _add(self, content: Json) -> None:
        self.answer = self.answer or event_fields.answer_of(content)
        self.names.update(event_fields.names_of(content))
        self.numbered += "sequence_number" in content
        choices = event_fields.choices_of(content)
        for choice in choices:
            self._put(choice.get("index"), event_fields.of_choice(choice))
        if not choices:
            self._put(None, event_fields.of_event(content))

    def _put(self, key: Any, pieces: Iterable[Piece]) -> None:
        fields = self._fields.setdefault(key, {})
        for piece in pieces:
            fields.setdefault(piece.field, []).append(piece.words)


def _joined(parts: list[Any]) -> Words:
    return "".join(parts) if isinstance(parts[0], str) else [*chain.from_iterable(parts)]


@dataclass
class _Due:
    """Words of one field, of which the first `at` came again."""

    words: Words
    at: int = 0


class Owed:
    """What must come again before anything new may pass."""

    def __init__(self, sent: Sent) -> None:
        self._owed = {
            key: {field: _Due(words) for field, words in fields.items() if words}
            for key, fields in sent.fields().items()
        }
        self._answer, self._names, self._number = sent.answer, {**sent.names}, sent.numbered
        self._renamed: dict[bytes, bytes] = {}

    @property
    def is_due(self) -> bool:
        """Whether anything must still come again."""
        return any(self._owed.values())

    def unsent(self, event: bytes) -> bytes:
        """What of this event of the new answer the client does not have, as part of the one that
        was begun. Raises `ApiError` if it is another answer."""
        content = content_of(event)
        if content is None:
            if event.startswith(DONE) and self.is_due:
                raise otherwise()
            return event + END
        for place, name in event_fields.names_of(content):
            begun = self._names.get(place, name)
            if begun != name:
                self._renamed[msgspec.json.encode(name)] = msgspec.json.encode(begun)
        if not self._has_new(content):
            return b""
        event_fields.belongs_to(content, self._answer)
        if "sequence_number" in content:
            content["sequence_number"] = self._number
            self._number += 1
        said = with_content(event, content)
        for drawn, begun_with in self._renamed.items():
            said = said.replace(drawn, begun_with)  # in quotes, as no text has them
        return said + END

    def unsent_of(self, events: bytes) -> tuple[bytes, ApiError | None]:
        """`unsent` of several, up to the first that is of another answer."""
        passed = []
        try:
            for event in events.split(END)[:-1]:
                passed.append(self.unsent(event))
        except ApiError as error:
            return b"".join(passed), error
        return b"".join(passed), None

    def _has_new(self, content: Json) -> bool:
        """Takes out what was sent; whether anything is left."""
        choices = event_fields.choices_of(content)
        if not choices:
            return self._is_new(None, event_fields.of_event(content))
        kept = []
        for choice in choices:
            was_owed = bool(self._owed.get(choice.get("index")))
            if self._is_new(choice.get("index"), event_fields.of_choice(choice)):
                if was_owed:
                    event_fields.tidied(choice)
                kept.append(choice)
        content["choices"] = kept
        return bool(kept)

    def _is_new(self, key: Any, pieces: Iterable[Piece]) -> bool:
        owed = self._owed.get(key)
        if not owed:
            return True
        is_new = False
        for piece in pieces:
            due = owed.get(piece.field) or _Due(piece.words[:0])
            common = min(len(due.words) - due.at, len(piece.words))
            if piece.words[:common] != due.words[due.at : due.at + common]:
                raise otherwise()
            is_new |= len(piece.words) > common
            if common:
                due.at += common
                piece.drop(common)
                if due.at == len(due.words):
                    del owed[piece.field]
        if is_new and owed:
            raise otherwise()
        return is_new


def otherwise() -> ApiError:
    """Of an answer that cannot go on, as the next engine says something else."""
    return ApiError(
        502, "the engine failed in mid-answer, and another one answers otherwise; ask again"
    )


class Replay(Plain):
    """A stream that can be asked for anew."""

    asks_anew = True
    """It is never continued otherwise."""

    def __init__(self, path: str, last: bytes | None = None) -> None:
        super().__init__(ENDS[path], last)
        self.migrations = 0
        self._sent = Sent()
        self._owed: Owed | None = None

    def take(self, events: bytes) -> bytes:
        """See `EventWatcher`; sets `failure` if the engine failed, or says otherwise."""
        events = super().take(events)
        failed_at = failure_in(events)
        if failed_at is not None:
            events = events[:failed_at]
            self._fails(ApiError(502, "the engine failed in mid-answer"))
        if self._owed is not None:
            events, failure = self._owed.unsent_of(events)
            if failure is not None:
                self._fails(failure)
        if events:
            self._sent.add(events)
        return events

    def finish(self) -> bytes:
        """See `Watcher`."""
        said = super().finish()
        if self._is_whole and self._owed is not None and self._owed.is_due:
            self._fails(otherwise())
        return said

    def begins_anew(self) -> None:
        """The next events are of the same request at another engine."""
        self.migrations += 1
        self._latest = b""
        self.restart()
        self._owed = Owed(self._sent)

    def _fails(self, failure: ApiError) -> None:
        self.failure, self._is_whole, self._latest = failure, False, b""
