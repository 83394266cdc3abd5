"""Which streams tokens continue, and how far: what is read of a request's body for that.

Only those whose answer hangs on nothing but its tokens: no penalties, stop strings, grammars, seed,
or log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.router.api.paths import CHAT, COMPLETION

_COMPLETION_TOKENS = 16  # of a completion that says no max_tokens

# What the rest's body keeps of the client's.
KEPT = frozenset(
    [
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "ignore_eos",
        "stop_token_ids",
        "logit_bias",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "user",
        "priority",
        "stream_options",
        "cache_salt",
        "seed",
    ]
)
# Keys that may be there, and the values for which an answer still continues exactly.
_ANY = (KEPT - {"seed"}) | frozenset(
    [
        "prompt",
        "messages",
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "request_id",
        "metadata",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "store",
    ]
)
_IF: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (None, 1),
    "echo": (False,),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "length_penalty": (None, 1, 1.0),
    "stop": (None, []),
    "suffix": (None, ""),
    "tools": (None, []),
    "response_format": (None, {"type": "text"}),
    "use_beam_search": (None, False),
    "return_token_ids": (None, False, True),
}
_COUNTS = ("max_tokens", "max_completion_tokens", "min_tokens")


def is_continuable(path: str, body: Mapping[str, Any]) -> bool:
    """Whether another engine continues this request's answer exactly, behind the tokens sent."""
    if path not in (CHAT, COMPLETION) or body.get("stream") is not True:
        return False
    if not all(key in _ANY or _may_be(body, key) for key in body):
        return False
    if not all(isinstance(body.get(key), int | None) for key in _COUNTS):
        return False
    if body.get("min_tokens", 0) is None or (path == COMPLETION and body.get("logprobs") is False):
        return False  # the one is refused, the other read as 0: the token's own
    if not isinstance(body.get("stream_options"), dict | None):
        return False
    return _is_text(body)


def limit_of(
    body: Mapping[str, Any], said: Mapping[str, str], prompt: int, *, is_chat: bool
) -> int | None:
    """How many tokens may be given behind a prompt of so many, as vLLM 0.32 reads it. None: as many
    as the engine has room for, and it did not say how many that are."""
    limit: int | None = body.get("max_tokens")
    if not is_chat:
        return _COMPLETION_TOKENS if limit is None else limit
    if body.get("max_completion_tokens") is not None:
        limit = body["max_completion_tokens"]
    most = said.get("max_model_len", "")
    if limit is not None or not most.isdecimal():
        return limit
    room, usual = int(most) - prompt, said.get("max_tokens", "")  # of the generation config
    return min(room, int(usual)) if usual.isdecimal() else room


def _may_be(body: Mapping[str, Any], key: str) -> bool:
    value = body[key]
    if key == "seed" and body.get("temperature") == 0:
        return True
    # By type as well: `logprobs` of 0 is not False.
    return any(type(value) is type(one) and value == one for one in _IF.get(key, (None,)))


def _is_text(body: Mapping[str, Any]) -> bool:
    """Whether one prompt of text or tokens is all there is: nothing that tokens do not say."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if prompt is not None:
        return isinstance(prompt, str) or (
            isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        )
    return isinstance(messages, list) and all(
        isinstance(m, dict) and _is_words(m.get("content")) for m in messages
    )


def _is_words(content: Any) -> bool:
    return isinstance(content, str) or (
        isinstance(content, list)
        and all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    )
