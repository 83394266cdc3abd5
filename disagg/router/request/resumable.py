"""Which streams another engine can continue exactly from the tokens sent.

Only those whose answer depends on nothing but its tokens: no penalties, stop strings, grammars,
seed, or log-probabilities. A field that this module does not know stands against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.router.api.bodies import CONTINUED
from disagg.router.api.paths import CHAT, COMPLETION

# Fields of any value, and fields with the values for which an answer still continues exactly.
_ANY = (CONTINUED - {"seed"}) | frozenset(
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


def obstacle(path: str, body: Mapping[str, Any]) -> str | None:
    """The field of the body for which another engine could not continue the answer behind the
    tokens sent; None if it could. "path" for an API whose streams are not continued."""
    if path not in (CHAT, COMPLETION):
        return "path"
    if body.get("stream") is not True:
        return "stream"
    for key in body:
        if key not in _ANY and not _may_be(body, key):
            return key
    for key in _COUNTS:
        if not isinstance(body.get(key), int | None):
            return key
    if body.get("min_tokens", 0) is None:
        return "min_tokens"  # vLLM refuses it
    if path == COMPLETION and body.get("logprobs") is False:
        return "logprobs"  # vLLM reads it as 0: the token's own
    if not isinstance(body.get("stream_options"), dict | None):
        return "stream_options"
    return None if _is_text(body) else "messages" if path == CHAT else "prompt"


def _may_be(body: Mapping[str, Any], key: str) -> bool:
    value = body[key]
    if key == "seed" and body.get("temperature") == 0:
        return True
    # The type counts too: `logprobs` of 0 is not False.
    return any(type(value) is type(one) and value == one for one in _IF.get(key, (None,)))


def _is_text(body: Mapping[str, Any]) -> bool:
    """Whether the prompt is one text or one list of tokens, without images or the like."""
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
