"""Errors as the OpenAI API spells them. Their text never names an address of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import JSONResponse

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "RequestHeadTooLargeError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(Exception):
    """Ends a request with this status and message."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.message, self.headers = status, message, headers
        super().__init__(message)

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.content(), self.status, self.headers)

    def event(self, *, named: bool = False) -> bytes:
        """The same as an event of a stream that has begun; `named`: where events have names, and
        Anthropic's clients look for a type."""
        if named:
            content = json.dumps({"type": "error", **self.content()}).encode()
            return b"event: error\ndata: " + content + b"\n\n"
        return b"data: " + json.dumps(self.content()).encode() + b"\n\n"

    def content(self) -> dict[str, object]:
        """The body in OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "InternalServerError"),
                "param": None,
                "code": self.status,
            }
        }


class EngineRefusal(ApiError):
    """An engine's own error, passed on as it is."""

    def __init__(self, status: int, content: dict[str, object]) -> None:
        super().__init__(status, "the engine refused")
        self._content = content

    def content(self) -> dict[str, object]:
        return self._content

    @classmethod
    def of(cls, status: int, answer: bytes) -> ApiError:
        """What an engine answered with this status, if it is an error in OpenAI's shape; else
        one of ours, since pages of proxies and the like name addresses."""
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError):
            content = None
        error = content.get("error") if isinstance(content, dict) else None
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return cls(status, content)
        return ApiError(status if status in _TYPES else 502, f"an engine answered {status}")
