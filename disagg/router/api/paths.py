"""The APIs whose prompts are handed over, by their paths; all others go to decode as they are."""

from __future__ import annotations

from collections.abc import Mapping

from disagg.router.api.errors import Style
from disagg.router.api.event_stream import DONE

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"  # OpenAI's newer one, and Anthropic's

_ERROR = b"event: error"
_RESPONDED = (
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)
# How the last event of a whole stream begins.
ENDS: Mapping[str, tuple[bytes, ...]] = {
    COMPLETION: (DONE,),
    CHAT: (DONE,),
    RESPONSES: (*_RESPONDED, _ERROR),
    MESSAGES: (b"event: message_stop", _ERROR),
}
PAIRED = tuple(ENDS)


def style(path: str) -> Style:
    """How its clients expect errors."""
    if path.startswith(MESSAGES):
        return "anthropic"
    return "named" if path == RESPONSES else "openai"
