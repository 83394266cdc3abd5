"""What a client sees of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from disagg.testing.http import client


@dataclass
class Streamed:
    """What a client saw of one stream."""

    text: str = ""
    events: int = 0
    ids: set[str] = field(default_factory=set)
    tokens: list[int] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False

    def check(self, reference: dict[str, Any]) -> None:
        """That it is this answer, which was not streamed, in one stream that ended."""
        choice = reference["choices"][0]
        assert self.text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert self.finish == [choice["finish_reason"]]
        assert len(self.ids) == 1
        assert self.is_done
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert self.usage[count] == reference["usage"][count]


def stream(url: str, path: str, body: dict[str, Any], seen: Streamed) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client().stream("POST", f"{url}{path}", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line:
                continue
            assert not seen.is_done, "nothing follows the end"
            if line == "data: [DONE]":
                seen.is_done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            seen.events += 1
            seen.ids.add(event["id"])
            seen.usage = event.get("usage") or seen.usage
            for choice in event["choices"]:
                seen.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                seen.tokens += choice.get("token_ids") or []
                seen.finish += [choice["finish_reason"]] if choice["finish_reason"] else []


def events_of(url: str, path: str, body: dict[str, Any], seen: list[bytes]) -> list[bytes]:
    """The events of a stream that must end well, added to `seen` as they come."""
    body = {**body, "stream": True}
    with client().stream("POST", f"{url}{path}", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        event = b""
        for line in answer.iter_lines():
            event += line.encode() + b"\n"
            if not line:
                assert not event.startswith((b"event: error", b'data: {"error"')), event
                seen.append(event)
                event = b""
    return seen
