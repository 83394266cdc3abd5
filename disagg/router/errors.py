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

    def event(self) -> bytes:
        """The same as an event of a stream that has begun."""
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
