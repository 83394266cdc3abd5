"""Errors in the formats of OpenAI's and Anthropic's APIs. They must never name internal hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from starlette.responses import JSONResponse

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "RequestHeadTooLargeError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

Style = Literal["openai", "named", "anthropic"]
"""named: OpenAI's format, in streams whose events have names."""


class ApiError(Exception):
    """The request fails with this status and message. `param`: the field that is wrong, if one is
    alone."""

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
    ) -> None:
        self.status, self.message, self.headers = status, message, headers
        self._param = param
        super().__init__(message)

    def response(self, style: Style = "openai") -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.content(style), self.status, self.headers)

    def event(self, style: Style = "openai") -> bytes:
        """The error as an event, for a stream that has begun."""
        content = self.content(style)
        if style == "openai":
            return b"data: " + json.dumps(content).encode() + b"\n\n"
        content = {"type": "error", **content}
        return b"event: error\ndata: " + json.dumps(content).encode() + b"\n\n"

    def content(self, style: Style = "openai") -> dict[str, object]:
        """The JSON body."""
        if style == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "InternalServerError"),
                "param": self._param,
                "code": self.status,
            }
        }


class Unreachable(ApiError):
    """No connection to an engine could be made, so nothing was sent."""

    def __init__(self, role: str) -> None:
        super().__init__(503, f"the {role} engine cannot be reached")


class EngineRefusal(ApiError):
    """An engine's own error, passed on unchanged."""

    def __init__(self, status: int, content: dict[str, object]) -> None:
        super().__init__(status, "the engine refused")
        self._content = content

    def content(self, style: Style = "openai") -> dict[str, object]:
        return self._content

    @classmethod
    def of(cls, status: int, answer: bytes) -> ApiError:
        """The engine's error, if its body has one of the formats above; else an error of the
        router's, since the error page of a proxy may name internal addresses."""
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError):
            content = None
        error = content.get("error") if isinstance(content, dict) else None
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return cls(status, content)
        return ApiError(status if status in _TYPES else 502, f"an engine answered {status}")


CUT = "the router stopped before the end of this answer"
"""The cancel message of requests that did not finish before the drain deadline."""
