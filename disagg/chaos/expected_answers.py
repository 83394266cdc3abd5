"""The right answers of the fake engines in `disagg bench router-faults`.

A token is a function of the prompt's first token and its position, so every answer can be checked
token for token, even if another engine continued it. Events have vLLM's form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

VOCABULARY = 50_021
MODELS, NO_MODEL = ("m", "other"), "nobody"
CHAT = "/v1/chat/completions"
_SPECIAL = 6  # every sixth token id is a special token


def token_at(seed: int, position: int) -> int:
    """The token at a position of the sequence that begins with `seed`."""
    return (seed * 31 + position * 7919) % VOCABULARY


def text_of(tokens: Sequence[int]) -> str:
    """The text of these tokens in an answer, which leaves special tokens out."""
    return "".join(f" w{token}" for token in tokens if token % _SPECIAL)


def detokenized(tokens: Sequence[int]) -> str:
    """The answer of /detokenize: it keeps special tokens, and drops the first space, as
    SentencePiece tokenizers do."""
    text = "".join(f" w{token}" if token % _SPECIAL else "<end>" for token in tokens)
    return text.removeprefix(" ")


def compact(content: Any) -> bytes:
    """JSON as vLLM writes it: without spaces."""
    return json.dumps(content, separators=(",", ":")).encode()


def generated(body: dict[str, Any]) -> list[int]:
    """The tokens that answer this body."""
    prompt = _prompt(body)
    first = len(prompt)
    count = body.get("max_completion_tokens") or body["max_tokens"]
    return [token_at(prompt[0], position) for position in range(first, first + count)]


def answer(path: str, body: dict[str, Any]) -> bytes:
    """The JSON bytes of an answer that is not streamed."""
    return compact(content(path, body))


def content(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The content of an answer that is not streamed."""
    tokens, is_chat = generated(body), path == CHAT
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": text_of(tokens)}
    else:
        choice["text"] = text_of(tokens)
    kind = "chat.completion" if is_chat else "text_completion"
    head = {"id": "cmpl-1", "object": kind, "created": 1, "model": "m"}
    if body.get("return_token_ids"):
        choice["token_ids"] = tokens
        (head if is_chat else choice)["prompt_token_ids"] = _prompt(body)
    return {**head, "choices": [choice], "usage": _usage(body)}


def events(path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """vLLM's events, one per token, then `[DONE]`."""
    tokens = generated(body)
    is_chat, with_ids = path == CHAT, body.get("return_token_ids")
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    head: dict[str, Any] = {"id": "cmpl-1", "object": kind, "created": 1, "model": "m"}
    if is_chat:
        delta = {"role": "assistant", "content": ""}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
        first = {**head, "choices": [{**choice, "logprobs": None}]}
        yield _event(first | ({"prompt_token_ids": _prompt(body)} if with_ids else {}))
    for number, token in enumerate(tokens):
        choice = {"index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None}
        text = text_of([token])
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        if with_ids:
            choice |= {"prompt_token_ids": _prompt(body)} if not (number or is_chat) else {}
            choice["token_ids"] = [token]
        if number == len(tokens) - 1:
            choice["finish_reason"] = "length"
        yield _event({**head, "choices": [choice], "usage": None})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event({**head, "choices": [], "usage": _usage(body)})
    yield b"data: [DONE]\n\n"


def _prompt(body: dict[str, Any]) -> list[int]:
    """Token ids, or the numbers of a text."""
    prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return [int(word) for word in prompt.split()] if isinstance(prompt, str) else prompt


def _usage(body: dict[str, Any]) -> dict[str, int]:
    prompt, completion = len(_prompt(body)), len(generated(body))
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % compact(content)
