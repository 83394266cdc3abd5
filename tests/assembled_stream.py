"""What a client makes of a stream: of how it was cut into events nothing is left."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AssembledStream:
    """A stream of any API as its client has it in the end: `fields` put together, what came `once`,
    by which `names` each part was called, and the sequence `numbers`."""

    fields: dict[Any, Any] = field(default_factory=dict)
    once: list[Any] = field(default_factory=list)
    names: dict[Any, set[Any]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, data: bytes) -> AssembledStream:
        whole = cls()
        for event in data.split(b"\n\n")[:-1]:
            line = event.split(b"\n")[-1].removeprefix(b"data: ")
            if line == b"[DONE]":
                whole.once.append("done")
            else:
                whole._take(json.loads(line))
        return whole

    def of_choice(self, choice: int) -> dict[Any, Any]:
        return {place: each for place, each in self.fields.items() if place[0] == choice}

    def _take(self, content: dict[str, Any]) -> None:
        for key in ("id", "created"):
            self._called(key, content)
        self._called("id", content, content.get("output_index"), "item_id")
        if "sequence_number" in content:
            self.numbers.append(content["sequence_number"])
        for choice in content.get("choices", ()):
            at = choice["index"]
            self._add((at, "text"), choice.get("text"))
            for name, value in choice.get("delta", {}).items():
                for call in value if name == "tool_calls" else ():
                    place: Any = (at, "call", call["index"])
                    self._add((*place, "name"), call["function"].get("name"))
                    self._add((*place, "arguments"), call["function"].get("arguments"))
                    self._called("id", call, place)
                if name != "tool_calls":
                    self._add((at, name), value)
            probs = choice.get("logprobs") or {}
            self._add((at, "tokens"), probs.get("tokens"))
            self._add((at, "probs"), len(probs.get("token_logprobs") or ()))
            self._add((at, "chat tokens"), [one["token"] for one in probs.get("content") or ()])
            self._add((at, "ids"), choice.get("token_ids"))
            self._add((at, "prompt"), choice.get("prompt_token_ids"))
            self._add((at, "end"), choice.get("finish_reason"))
        if "choices" in content:
            if usage := content.get("usage"):
                own = "prompt_tokens_details"  # tells of one engine's prefix cache
                self._add("usage", [{name: n for name, n in usage.items() if name != own}])
            return
        delta = content.get("delta")
        place = (content.get("type"), content.get("output_index"), content.get("index"))
        if isinstance(delta, str):
            self._add(place, delta)
            self._add((*place, "tokens"), [one["token"] for one in content.get("logprobs") or ()])
        elif content["type"] == "content_block_delta":
            for name, value in (delta or {}).items():
                self._add((*place, name), "" if name == "type" else value)
        else:
            what = content.get("response") or content.get("message") or content.get("item") or {}
            for key in ("id", "call_id", "created_at"):
                self._called(key, what, content.get("output_index"))
            text = content.get("text") or (content.get("item") or {}).get("text")
            self.once.append((content["type"], *place, text))

    def _called(self, key: str, what: dict[str, Any], place: Any = None, by: str = "") -> None:
        if (by or key) in what:
            self.names.setdefault((place, key), set()).add(what[by or key])

    def _add(self, place: Any, value: Any) -> None:
        if value:
            self.fields[place] = self.fields[place] + value if place in self.fields else value
