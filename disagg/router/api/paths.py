"""Which paths are split into two legs, and which others clients may use.

Paths that are not split go to a decode engine unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from disagg.router.api.errors import Style
from disagg.router.api.event_stream import DONE

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"  # OpenAI Responses; Anthropic Messages

_ERROR = b"event: error"
_RESPONSE_ENDS = (
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)
# The first bytes of the last event of a complete stream.
ENDS: Mapping[str, tuple[bytes, ...]] = {
    COMPLETION: (DONE,),
    CHAT: (DONE,),
    RESPONSES: (*_RESPONSE_ENDS, _ERROR),
    MESSAGES: (b"event: message_stop", _ERROR),
}
PAIRED = tuple(ENDS)


def style(path: str) -> Style:
    """The error format that clients of this path expect."""
    if path.startswith(MESSAGES):
        return "anthropic"
    return "named" if path == RESPONSES else "openai"


# The paths of vLLM 0.32 that only infer or read. Every other path is an operator's: what a path
# that is not here does to an engine is not known.
CLIENTS = frozenset(
    [
        *PAIRED,
        "/classify",
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/detokenize",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/load",
        "/ping",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/tokenizer_info",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/embeddings",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/models",
        "/v1/rerank",
        "/v1/responses/render",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
        "/version",
    ]
)
# A stored response. Its id must not lead elsewhere, also if a proxy decodes the path once more.
_STORED = re.compile(rf"{RESPONSES}/[A-Za-z0-9_:-]{{1,256}}(/cancel)?", re.ASCII)


def is_for_clients(path: str) -> bool:
    """Whether a client's key opens this path, decoded once, as engines decode it."""
    return path in CLIENTS or _STORED.fullmatch(path) is not None
