"""Streams that another engine gives once more from their beginning, without what was sent already.

Tokens do not continue everything (`migration.py`): not tool calls, reasoning, grammars, stop
strings, penalties, log-probabilities, nor the newer APIs. But where no chance is in it, an answer
that is asked for anew begins as the one that broke off. So what was sent is kept, and of the new
answer as much is held back, compared field by field (`event_fields.py`): one that begins otherwise
ends in an error. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from disagg.router import event_fields
from disagg.router.errors import ApiError
from disagg.router.event_fields import Field, Json, Piece
from disagg.router.events import DONE, END, Plain, content_of, failure_in, with_content
from disagg.router.legs import hangs_on_one_engine
from disagg.router.paths import ENDS, MESSAGES, RESPONSES

_MOST_KEPT = 4 << 20  # bytes of one answer


def repeats(path: str, body: Mapping[str, Any]) -> bool:
    """Whether asking once more gives the same stream: nothing in it is drawn anew, nor hangs on
    what one engine keeps."""
    if body.get("stream") is not True or (path == RESPONSES and hangs_on_one_engine(body)):
        return False
    if _number(body, "temperature") == 0 or _number(body, "top_k") == 1:
        return True
    return path != MESSAGES and _number(body, "seed") is not None


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


class Sent:
    """What a client has of an answer: whole events, as they were sent."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._size = 0

    @property
    def is_all(self) -> bool:
        """Whether nothing was forgotten, for being too much."""
        return self._size <= _MOST_KEPT

    def add(self, events: bytes) -> None:
        """These were sent next."""
        self._size += len(events)
        if self.is_all:
            self._events.append(events)
        else:
            self._events.clear()

    def owed(self) -> Owed:
        """What an answer that is given anew must say first."""
        return Owed(event for events in self._events for event in events.split(END)[:-1])


class Owed:
    """What must come again before anything new may pass."""

    def __init__(self, sent: Iterable[bytes]) -> None:
        # Of each choice, by its index; None: of an answer that has no choices.
        self._owed: dict[Any, dict[Field, Any]] = {}
        self._answer: Json = {}
        self._names: dict[Field, str] = {}
        self._renamed: dict[bytes, bytes] = {}
        self._number = 0
        for event in sent:
            if (content := content_of(event)) is not None:
                self._add(content)

    def unsent(self, event: bytes) -> bytes:
        """What of this event of the new answer the client does not have, as part of the one that
        was begun. Raises `ApiError` if it is another answer."""
        content = content_of(event)
        if content is None:
            if event.startswith(DONE) and any(self._owed.values()):
                raise _otherwise()
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

    def _add(self, content: Json) -> None:
        self._answer = self._answer or event_fields.answer_of(content)
        self._names.update(event_fields.names_of(content))
        self._number += "sequence_number" in content
        choices = event_fields.choices_of(content)
        for choice in choices:
            self._owe(choice.get("index"), event_fields.of_choice(choice))
        if not choices:
            self._owe(None, event_fields.of_event(content))

    def _owe(self, key: Any, pieces: Iterable[Piece]) -> None:
        owed = self._owed.setdefault(key, {})
        for piece in pieces:
            owed[piece.field] = owed.get(piece.field, piece.words[:0]) + piece.words

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
            due = owed.get(piece.field, piece.words[:0])
            common = min(len(due), len(piece.words))
            if piece.words[:common] != due[:common]:
                raise _otherwise()
            is_new |= len(piece.words) > common
            if common:
                owed[piece.field] = due[common:]
                piece.drop(common)
        for field in [field for field, due in owed.items() if not due]:
            del owed[field]
        if is_new and owed:
            raise _otherwise()
        return is_new


def _otherwise() -> ApiError:
    return ApiError(502, "the engine failed in mid-answer, and another one answers otherwise")


class Replay(Plain):
    """A stream that can be asked for anew."""

    def __init__(self, path: str) -> None:
        super().__init__(ENDS[path])
        self.migrations = 0
        self._sent = Sent()
        self._owed: Owed | None = None

    @property
    def asks_anew(self) -> bool:
        """Whether it can go on, which is by asking for all of it."""
        return self._sent.is_all

    def feed(self, data: bytes) -> bytes:
        """See `Watcher`; sets `failure` if the engine said that it failed, or says otherwise."""
        events = super().feed(data)
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

    def begins_anew(self) -> None:
        """The next events are of the same request at another engine."""
        self.migrations += 1
        self._tail, self.failure = b"", None
        self._owed = self._sent.owed()

    def _fails(self, failure: ApiError) -> None:
        self.failure, self.is_whole = failure, False
