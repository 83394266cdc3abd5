"""What vLLM's completions and chats can be asked, and what an answer says, whole or streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.testing.http import client

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Where do the blocks go when the prompt was read? " * 12


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TALK = said("user", TEXT)
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
SEEDED: dict[str, Any] = {"temperature": 1.5, "seed": 11}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CITY_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {{ mood }} {% endfor %}"

# What is asked of each field, with what goes with it. Wrong values too: their errors are one
# engine's as well.
BOTH: dict[str, list[dict[str, Any]]] = {
    "model": [{"model": None}, {"model": "other"}, {"model": 3}],
    "frequency_penalty": [{"frequency_penalty": 1.5}, {"frequency_penalty": 9}],
    "presence_penalty": [{"presence_penalty": -1.5}],
    "repetition_penalty": [{"repetition_penalty": 1.3}, {"repetition_penalty": 0}],
    "logit_bias": [{"logit_bias": {"300": 100}}, {"logit_bias": {"300": 5, "999999": 1}}],
    "n": [{"n": 3, **SEEDED}, {"n": 1}, {"n": 0}, {"n": None}],
    "seed": [SEEDED, {"seed": 5}, {**SEEDED, "seed": "x"}],
    "stop": [{"stop": [" the", "a"]}, {"stop": "e"}, {"stop": []}, {"stop": 5}],
    "stream": [],  # all of them are
    "stream_options": [
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": None},
        {"stream_options": {"unknown": 1}},
        {"stream_options": 7},
    ],
    "temperature": [{"temperature": 0.0}, {"temperature": -1}, {"temperature": None, "seed": 3}],
    "top_p": [{**SEEDED, "top_p": 0.5}, {"top_p": 2}],
    "top_k": [{**SEEDED, "top_k": 3}, {"top_k": -5}],
    "min_p": [{**SEEDED, "min_p": 0.2}],
    "user": [{"user": "somebody"}],
    "use_beam_search": [{"use_beam_search": True, "n": 2}],
    "watermarking": [{"watermarking": True}, {"watermarking": False}],
    "length_penalty": [{"length_penalty": 0.5}],
    "stop_token_ids": [{"stop_token_ids": list(range(300, 600))}, {"stop_token_ids": None}],
    "include_stop_str_in_output": [{"include_stop_str_in_output": True, "stop": ["e"]}],
    "ignore_eos": [{"ignore_eos": True, "max_tokens": 30}],
    "min_tokens": [{"min_tokens": 8}, {"min_tokens": 9}, {"min_tokens": -1}],
    "skip_special_tokens": [{"skip_special_tokens": False, "logit_bias": {"2": 100}}],
    "spaces_between_special_tokens": [{"spaces_between_special_tokens": False}],
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": count} for count in (100, -1, 0)],
    "truncation_side": [{"truncate_prompt_tokens": 90, "truncation_side": "left"}],
    "prompt_logprobs": [{"prompt_logprobs": 1}, {"prompt_logprobs": -2}],
    "allowed_token_ids": [{"allowed_token_ids": [300, 301, 302]}, {"allowed_token_ids": []}],
    "bad_words": [{"bad_words": [" the", "e"]}],
    "add_special_tokens": [{"add_special_tokens": True}, {"add_special_tokens": False}],
    "response_format": [
        {"response_format": CITY_FORMAT, "max_tokens": 40},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_schema"}},
    ],
    "structured_outputs": [
        {"structured_outputs": {"regex": "(yes|no){3}"}},
        {"structured_outputs": {"choice": ["left", "right"]}},
        {"structured_outputs": {"regex": "("}},
    ],
    "priority": [{"priority": 0}, {"priority": 2}],
    "request_id": [{"request_id": "mine"}],
    "session_id": [{"session_id": "talk"}],
    "return_token_ids": [{"return_token_ids": True}],
    "routed_experts_prompt_start": [{"routed_experts_prompt_start": 3}],
    "return_token_offsets": [{"return_token_offsets": True}],
    "mm_payload": [{"mm_payload": "none"}],
    "return_mm_kwargs": [{"return_mm_kwargs": False}],
    "cache_salt": [{"cache_salt": "pepper"}, {"cache_salt": ""}],
    "repetition_detection": [
        {
            "repetition_detection": {"max_pattern_size": 1, "min_count": 4},
            "logit_bias": {"300": 100},
            "max_tokens": 20,
        }
    ],
    "thinking_token_budget": [{"thinking_token_budget": 4}],
    "stream_interval": [{"stream_interval": 3}],
    "vllm_xargs": [{"vllm_xargs": {"mine": 1}}],
}
ONLY: dict[str, dict[str, list[dict[str, Any]]]] = {
    COMPLETION: {
        "prompt": [
            {"prompt": [5, 6, 7, *range(300, 400)]},
            {"prompt": [TEXT, "b"]},
            {"prompt": [[1, 2, 3], [4, 5]]},
            {"prompt": [TEXT]},
            {"prompt": ""},
            {"prompt": []},
            {"prompt": None},
            {"prompt": [10**9]},
        ],
        "max_tokens": [{"max_tokens": count} for count in (None, 0, 1, 2, -1, 10**9)],
        "echo": [{"echo": True}, {"echo": True, "logprobs": 2}, {"echo": True, "max_tokens": 0}],
        "suffix": [{"suffix": "x"}],
        "logprobs": [{"logprobs": 0}, {"logprobs": 3}, {"logprobs": 1000}],
        "logprob_token_ids": [
            {"logprobs": 1, "logprob_token_ids": [300, 301]},
            {"logprob_token_ids": [300]},
        ],
        "return_tokens_as_token_ids": [{"logprobs": 1, "return_tokens_as_token_ids": True}],
    },
    CHAT: {
        "messages": [
            {"messages": [said("user", [{"type": "text", "text": TEXT}])]},
            {"messages": [said("system", "Be short."), TALK, said("assistant", "Well"), TALK]},
            {"messages": []},
            {"messages": "hello"},
        ],
        "max_tokens": [
            {"max_tokens": None, "min_tokens": 30, "stop_token_ids": [*range(300, 370)]},
            *({"max_tokens": count} for count in (0, 1, 2, -1, 10**9)),
        ],
        "max_completion_tokens": [
            {"max_completion_tokens": 5},
            {"max_completion_tokens": None},
            {"max_completion_tokens": 0},
            {"max_completion_tokens": 20, "max_tokens": 3},
        ],
        "logprobs": [{"logprobs": True}],
        "top_logprobs": [{"logprobs": True, "top_logprobs": 2}, {"top_logprobs": 2}],
        "logprob_token_ids": [
            {"logprobs": True, "logprob_token_ids": [300, 301]},
            {"logprob_token_ids": [300]},
        ],
        "return_tokens_as_token_ids": [{"logprobs": True, "return_tokens_as_token_ids": True}],
        "tools": [{"tools": [TOOL], "tool_choice": "auto"}, {"tools": []}],
        "tool_choice": [
            {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {"tools": [TOOL], "tool_choice": "none"},
            {"tool_choice": "auto"},
        ],
        "parallel_tool_calls": [{"parallel_tool_calls": False}],
        "reasoning_effort": [{"reasoning_effort": "low"}],
        "include_reasoning": [{"include_reasoning": False}],
        "echo": [{"echo": True, "messages": [TALK, said("assistant", "Once")]}],
        "add_generation_prompt": [{"add_generation_prompt": False}],
        "continue_final_message": [
            {
                "continue_final_message": True,
                "add_generation_prompt": False,
                "messages": [TALK, said("assistant", "Once upon")],
            },
            {"continue_final_message": True, "add_generation_prompt": True},
        ],
        "documents": [{"documents": [{"title": "a", "text": "b"}]}],
        "chat_template": [{"chat_template": TEMPLATE}],
        "chat_template_kwargs": [{"chat_template_kwargs": {"mood": "well"}}],
        "media_io_kwargs": [{"media_io_kwargs": {"image": {}}}],
        "mm_processor_kwargs": [{"mm_processor_kwargs": {}}],
        "return_prompt_text": [{"return_prompt_text": True}],
    },
}
# Each answer's own, and each engine's.
NAMES = ("created", "system_fingerprint", "kv_transfer_params")


def cases(path: str, *, of_each_field: int | None = None) -> list[dict[str, Any]]:
    """Requests for every field: all of them, or so many of each field."""
    return [more for each in {**BOTH, **ONLY[path]}.values() for more in each[:of_each_field]]


def whole(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client().post(f"{url}{path}", json=body, timeout=60)
    content = answer.json()
    for name in NAMES:
        content.pop(name, None)
    return {"status": answer.status_code, **content, "usage": counted(content.get("usage"))}


def counted(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """Without what was in whose prefix cache."""
    return usage and {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}


def streamed(url: str, path: str, body: dict[str, Any], name: str = "") -> dict[str, Any]:
    """What the events of a stream say together, however it was cut into them. `name`: the
    request's."""
    headers = {"x-request-id": name} if name else {}
    told: dict[str, Any] = {"choices": {}, "usage": None, "ends": 0}
    with client().stream(
        "POST", f"{url}{path}", json={**body, "stream": True}, timeout=60, headers=headers
    ) as got:
        if got.status_code != 200:
            got.read()
            return {"status": got.status_code, **got.json()}
        for line in filter(None, got.iter_lines()):
            if line == "data: [DONE]":
                told["ends"] += 1
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:  # an engine's stream may begin with its refusal
                return {"status": event["error"]["code"], **event}
            told["usage"] = counted(event.get("usage")) or told["usage"]
            told["prompt"] = event.get("prompt_token_ids") or told.get("prompt")
            for choice in event.get("choices", ()):
                add(told["choices"].setdefault(choice["index"], {}), choice)
    return {"status": 200, **told}


def add(known: dict[str, Any], more: dict[str, Any]) -> None:
    """Lists and texts grow, and what is said once stays."""
    for key, value in more.items():
        if isinstance(value, dict):
            add(known.setdefault(key, {}), value)
        elif isinstance(value, list) and all(
            isinstance(one, dict) and "index" in one for one in value
        ):
            for one in value:
                add(known.setdefault(key, {}).setdefault(one["index"], {}), one)
        elif isinstance(value, list) and key != "prompt_token_ids":
            known[key] = known.get(key, []) + value
        elif isinstance(value, str) and key in ("text", "content", "reasoning", "arguments"):
            known[key] = known.get(key, "") + value
        elif value is not None and key != "id":
            known[key] = value


_NUMBERS = itertools.count()


def numbered(path: str, more: dict[str, Any]) -> dict[str, Any]:
    """The request, with a prompt of its own, whose blocks no engine has."""
    text = f"{next(_NUMBERS)}: {TEXT}"
    usual = {"prompt": text} if path == COMPLETION else {"messages": [said("user", text)]}
    return {**GREEDY, **usual, **more}


def differing(got: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Where they are not the same but for the last digits of log-probabilities."""
    if isinstance(got, dict) and isinstance(expected, dict) and got.keys() == expected.keys():
        for key in got.keys() - {"id"}:
            yield from differing(got[key], expected[key], f"{where}.{key}")
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for number, pair in enumerate(zip(got, expected, strict=True)):
            yield from differing(*pair, f"{where}[{number}]")
    elif isinstance(got, float) and isinstance(expected, float):
        if got != pytest.approx(expected, abs=1e-3):
            yield f"{where}: {got}, not {expected}"
    elif got != expected:
        yield f"{where}: {got!r}, not {expected!r}"
