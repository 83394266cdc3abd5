"""The paths of the APIs that are split into two legs. All other paths go to decode unchanged."""

from __future__ import annotations

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
