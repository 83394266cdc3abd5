"""Which web pages may read answers (CORS), with the settings that vLLM has.

The server adds the fields to every answer, its own errors included: without them a browser hides
even the status. A preflight needs no key, because browsers send none with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.config import CorsSection
from disagg.router.api.errors import ApiError

Fields = list[tuple[bytes, bytes]]
# What the router adds to answers. A browser shows pages all fields only without credentials.
_EXPOSED = ("x-request-id", "retry-after")
_VARY = (b"vary", b"Origin")


class Cors:
    """The rules of one router."""

    def __init__(self, section: CorsSection) -> None:
        self._rules = CORSMiddleware(
            _no_app,
            allow_origins=section.allowed_origins,
            allow_methods=section.allowed_methods,
            allow_headers=section.allowed_headers,
            allow_credentials=section.allow_credentials,
        )
        exposed = ", ".join(_EXPOSED) if section.allow_credentials else "*"
        self._any_origin = self._rules.allow_all_origins and not section.allow_credentials
        self._fields: Fields = [(b"access-control-expose-headers", exposed.encode())]
        if section.allow_credentials:
            self._fields.append((b"access-control-allow-credentials", b"true"))

    def fields(self, headers: Iterable[tuple[bytes, bytes]]) -> Fields:
        """What to add to the answer to a request with these headers (names in lower case)."""
        origin = next((value for name, value in headers if name == b"origin"), None)
        if self._any_origin:
            return [] if origin is None else [(b"access-control-allow-origin", b"*"), *self._fields]
        if origin is None or not self._rules.is_allowed_origin(origin.decode("latin-1")):
            return [_VARY]
        return [(b"access-control-allow-origin", origin), *self._fields, _VARY]

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a browser that asks whether it may send a request; None for another
        request. It has no fields of `fields`."""
        headers = Headers(scope=scope)
        if "origin" not in headers or "access-control-request-method" not in headers:
            return None
        answer = self._rules.preflight_response(headers)
        # The server adds these.
        for name in ("access-control-allow-origin", "access-control-allow-credentials"):
            if name in answer.headers:
                del answer.headers[name]
        if answer.status_code == 200:
            return answer
        reason = bytes(answer.body).decode()
        return ApiError(400, f"{reason} (router.cors)").response()


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotImplementedError
