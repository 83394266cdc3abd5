"""What was sent of one streamed answer, so that another engine can continue it where it broke off.

The router asks the engine for token ids (`return_token_ids`). Unless the client asked for them too,
it takes them out of the events as these pass; it changes nothing else, and does not parse them.
The rest of the answer is a plain completion of the prompt's tokens and those sent. Its events get
the shape and names of the first ones. Only streams that continue exactly have such a state: see
`resumable.py`. Does no I/O.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from disagg.router.api import bodies
from disagg.router.api.errors import ApiError
from disagg.router.api.event_parser import END
from disagg.router.api.event_stream import DONE, EventWatcher, content_of, failure_in
from disagg.router.request.plan import RequestPlan
from disagg.router.request.replay import Owed, Sent, otherwise

# The client's quotes are escaped inside of JSON strings, so that these are keys wherever they are.
_PROMPT = re.compile(rb'"prompt_token_ids":(\[[0-9,]*\])')
_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')
_FINISH, _NO_CHOICES = b'"finish_reason":"', b'"choices":[]'
_TEXT = re.compile(rb'"(?:content|text)":"[^"]')
HALF_A_CHARACTER = "\ufffd"
# Of a chat's delta: what a plain completion cannot continue.
_MORE_THAN_TEXT = re.compile(rb'"(?:reasoning|reasoning_content)":"|"tool_calls":\[\{')
_TOKENS_BEFORE = 4
_TEXT_KEPT = 16  # events whose text is compared before an answer goes on


def watched(plan: RequestPlan) -> Stream | None:
    """A watcher for this request's answer, or None if no other engine could continue it."""
    return Stream(plan) if plan.not_resumed is None else None


class Stream(EventWatcher):
    """One answer on its way to the client."""

    def __init__(self, plan: RequestPlan) -> None:
        super().__init__()
        self._plan, self._is_chat = plan, plan.is_chat
        self.migrations = 0
        self._prompt: list[int] | None = None
        self._tokens: list[int] = []
        self._first = b""  # the first event, for its id, time and model
        self._names: dict[str, Any] | None = None
        self._recent: deque[bytes] = deque(maxlen=_TEXT_KEPT)
        self._finished = self._done = self._usage_sent = False
        self._is_plain, self._continues = True, False
        self._has_text = False
        self._count = 0  # of events
        self._opening: tuple[int, int] | None = None  # tokens up to the first text, its event
        self._shows_ids = plan.shows_ids
        self._base = 0  # how many tokens earlier engines gave
        self._repeats: list[int] = []  # whose ids the client has, and the next engine gives again
        # What the client got, while it may be something that tokens do not continue.
        self._sent = Sent() if plan.is_chat and plan.not_replayed is None else None
        self._owed: Owed | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the client has all tokens; `left` is what else it must get."""
        return self._done or self._finished

    @property
    def has_begun(self) -> bool:
        """Whether the client has any of the text. Before that, the whole request is sent again: a
        token without text may be half a character, or open a reasoning part. A client that gets
        token ids has something as soon as it has an id."""
        return self._has_text or (self._shows_ids and bool(self._tokens or self._repeats))

    @property
    def asks_anew(self) -> bool:
        """Whether the whole request is sent again: if the client has nothing of the answer, or if
        an engine repeats what tokens do not continue (`replay.py`)."""
        if not self.has_begun:
            return True
        return not self._is_plain and self._sent is not None

    def take(self, events: bytes) -> bytes:
        """See `EventWatcher`. `failure` is set if the engine said that it failed."""
        failed_at = failure_in(events)
        if failed_at is not None:
            events = events[:failed_at]
            self.failure = ApiError(502, "the engine failed in mid-answer")
        return self._passed(events) if events else b""

    def left(self) -> bytes:
        """What the client must still get of an answer that has all its tokens."""
        if self._done:
            return b""
        events = b""
        if self._plan.wants_usage and not self._usage_sent:
            given = len(self._tokens)
            usage = {"prompt_tokens": len(self._prompt or ()), "completion_tokens": given}
            usage["total_tokens"] = sum(usage.values())
            events = self._event({"choices": [], "usage": usage})
        return events + DONE + END

    # ---- going on ------------------------------------------------------------------------------

    def tokens(self, back: int = 0) -> list[int]:
        """The tokens sent, without the last `back`."""
        return self._tokens[: len(self._tokens) - back]

    def before(self, begun: int = 0) -> list[int]:
        """What stands before the tokens behind the first `begun`: the end of the prompt, or of
        these. A tokenizer may write what begins a text otherwise."""
        return [*(self._prompt or []), *self._tokens[:begun]][-_TOKENS_BEFORE:]

    @property
    def opening(self) -> tuple[int, str] | None:
        """The first text that was sent, and with how many tokens; None if it is long past."""
        if self._opening is None:
            return None
        tokens, at = self._opening
        place = at - (self._count - len(self._recent))
        if place < 0:
            return None
        return tokens, "".join(map(_text_of, _choices([self._recent[place]])))

    def is_text_of(self, text: str, *, behind_opening: bool = False) -> bool:
        """Whether the text sent (behind the first one) ends as this one: else some of it was held
        back, or not all of the tokens were."""
        events = list(self._recent)
        if behind_opening and self._opening is not None:
            events = events[self._opening[1] + 1 - (self._count - len(events)) :]
        sent = "".join(map(_text_of, _choices(events)))
        held_back = not sent and text.endswith(HALF_A_CHARACTER)
        return text.endswith(sent) and not held_back

    def silent(self) -> set[int]:
        """Recent tokens whose event had no text: special ones, which answers leave out, or the
        first ones of a character in the making."""
        ids: list[list[int]] = [
            choice.get("token_ids") or []
            for choice in _choices(self._recent)
            if not _text_of(choice)
        ]
        return {each[0] for each in ids if len(each) == 1}

    def rest(self, back: int, reports: Mapping[str, str]) -> dict[str, Any] | None:
        """The body of the completion that continues behind all tokens but the last `back`.

        `reports`: by the engine that continues, of itself. None if the prompt's tokens or the limit
        are unknown.
        """
        if self._prompt is None or not self._is_plain:
            return None
        limit = self._plan.max_tokens(reports, len(self._prompt))
        if limit is None:
            return None
        given = self.tokens(back)
        return bodies.continued_body(
            self._plan.body,
            [*self._prompt, *given],
            max_tokens=limit - len(given),
            min_tokens=max(0, self._plan.min_tokens - len(given)),
        )

    def goes_on(self, back: int) -> None:
        """From now on, events are those of such a completion. A client that has the ids of the last
        `back` tokens does not get them again; if they become others, its answer fails."""
        if self._shows_ids:
            self._repeats = [*self._tokens[len(self._tokens) - back :], *self._repeats]
        self._tokens = self.tokens(back)
        self._base = len(self._tokens)
        self._continues = True
        self._restarts()

    def follows(self, reports: Mapping[str, str]) -> dict[str, Any]:
        """The body of the completion behind prefill's token. From now on, events are its own."""
        body = self.rest(0, reports)
        assert body is not None, "prefill's answer had the prompt, and `may_begin` saw the length"
        self._base, self._continues = len(self._tokens), True
        self.restart()
        return body

    def begins_anew(self) -> None:
        """From now on, events are those of the same request at another engine."""
        if self.has_begun and self._sent is not None:
            self._owed = Owed(self._sent)
        self._tokens, self._base = [], 0
        self._recent.clear()
        self._continues = bool(self._first)
        self._restarts()

    def _restarts(self) -> None:
        self.migrations += 1
        self.restart()

    # ---- events --------------------------------------------------------------------------------

    def _passed(self, events: bytes) -> bytes:
        if not self._first:
            self._first = events[: events.index(END)]
            prompt = _PROMPT.search(events)
            self._prompt = msgspec.json.decode(prompt[1]) if prompt else None
        each = events.split(END)[:-1]
        if not self._has_text:
            self._look_for_opening(each)
        self._count += len(each)
        self._tokens.extend(_ids_in(events))
        self._finished |= _FINISH in events
        self._done |= events.endswith(DONE + END)
        self._usage_sent |= _NO_CHOICES in events
        self._recent.extend(each)
        if self._is_chat and _MORE_THAN_TEXT.search(events):
            self._is_plain = False
            self._has_text = True
        self._has_text = self._has_text or _TEXT.search(events) is not None
        if self._owed is None and self._continues:
            shown = self._all_rewritten(each)
        elif self._shows_ids:
            shown = events
        else:
            shown = _IDS.sub(b'"token_ids":null', _PROMPT.sub(b'"prompt_token_ids":null', events))
        if self._owed is not None:
            shown, failure = self._owed.unsent_of(shown)
            if failure is not None:
                self.failure, self._finished, self._done = failure, False, False
        if self._sent is not None and self._has_text and self._is_plain:
            self._sent = None  # tokens continue it
        if self._sent is not None:
            self._sent.add(shown)
        return shown

    def _look_for_opening(self, each: Sequence[bytes]) -> None:
        given = len(self._tokens)
        for place, event in enumerate(each):
            given += len(_ids_in(event))
            if _TEXT.search(event):
                self._opening = given, self._count + place
                return

    def _all_rewritten(self, each: Iterable[bytes]) -> bytes:
        shown = []
        for event in each:
            told = self._rewritten(event)
            if told is None:  # other ids than the client has
                self.failure, self._is_plain, self._sent = otherwise(), False, None
                self._finished = self._done = False
                break
            shown.append(told)
        return b"".join(shown)

    def _rewritten(self, event: bytes) -> bytes | None:
        """An event of another answer, as one of the answer that was begun. Empty if it only repeats
        ids that the client has; None if others or none come in their place."""
        if event.startswith(DONE):
            return event + END
        content = content_of(event)
        if content is None:
            return event + END
        choices = []
        for choice in content.get("choices") or ():
            ids = (choice.get("token_ids") or []) if self._shows_ids else []
            again = self._repeats[: len(ids)]
            if again:
                if again != ids[: len(again)]:
                    return None
                del self._repeats[: len(again)]
                choice["token_ids"] = ids = ids[len(again) :]
            if self._repeats and choice.get("finish_reason"):
                return None
            if (self._is_chat or again) and not ids and _says_nothing(choice):
                return b""
            choices.append(self._choice(choice))
        changed: dict[str, Any] = {**content, "choices": choices}
        if "prompt_token_ids" in content:
            changed["prompt_token_ids"] = None
        usage = content.get("usage")
        if usage:
            prompt = usage["prompt_tokens"] - self._base
            given = usage["completion_tokens"] + self._base
            changed["usage"] = {**usage, "prompt_tokens": prompt, "completion_tokens": given}
        return self._event(changed)

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        ids = choice.get("token_ids") if self._shows_ids else None
        if not self._is_chat:
            return {**choice, "prompt_token_ids": None, "token_ids": ids}
        if "delta" in choice:
            return {**choice, "token_ids": ids}
        left_out = ("text", "prompt_token_ids", "prompt_logprobs")
        kept = {key: value for key, value in choice.items() if key not in left_out}
        return {**kept, "delta": {"content": choice["text"]}, "token_ids": ids}

    def _event(self, content: dict[str, Any]) -> bytes:
        if self._names is None:
            first = content_of(self._first) or {}
            keys = ("id", "object", "created", "model")
            self._names = {key: first[key] for key in keys if key in first}
        return b"data: " + msgspec.json.encode({**content, **self._names}) + END


def _ids_in(events: bytes) -> list[int]:
    return [int(id_) for ids in _IDS.findall(events) if ids for id_ in ids.split(b",")]


def _says_nothing(choice: Mapping[str, Any]) -> bool:
    """Neither text nor an end: a completion's empty event, or the role, which the client has."""
    delta = choice.get("delta") or {}
    said = {key for key, value in delta.items() if value} - {"role"}
    return not (said or choice.get("text") or choice.get("finish_reason"))


def _choices(events: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The choice of each event that has one."""
    for event in events:
        yield from ((content_of(event) or {}).get("choices") or ())[:1]


def _text_of(choice: Mapping[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
