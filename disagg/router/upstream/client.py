"""HTTP requests to engines: calls whose failures become `ApiError`s, and which headers pass.

The client's credentials must never reach an engine.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Mapping, Sequence, Set
from typing import TypeAlias

import aiohttp

from disagg import keepalive
from disagg.config import LimitsSection
from disagg.router.api.errors import ApiError, Unreachable
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import http1
from disagg.router.upstream.connector import Connector
from disagg.router.upstream.response import UpstreamResponse

# Headers of one connection only: RFC 9110, section 7.6.1.
_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
# The router checks the client's key; engines must not see it. The router's server has answered
# `Expect`; an engine would answer it again.
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"content-length",
    b"host",
    b"authorization",
    b"x-api-key",
    b"accept-encoding",
    b"cookie",
    b"expect",
    b"x-request-id",
    # What a client says of itself; an engine on this host would believe it.
    b"forwarded",
    b"x-forwarded-for",
    b"x-forwarded-proto",
    b"origin",  # the router itself says which pages may read an answer
}
_NOT_UPSTREAM_NOR_TRACE = _NOT_UPSTREAM | {b"traceparent", b"tracestate"}
_BODY_HEADERS = {b"content-type", b"content-encoding"}
NOT_DOWNSTREAM = _HOP_BY_HOP | {
    b"server",
    b"date",
    b"access-control-allow-credentials",
    b"access-control-allow-origin",
    b"access-control-expose-headers",
}
# The most frequent values of `Connection`. They name no header.
_NAME_NOTHING = {b"keep-alive", b"close", b"Keep-Alive"}
RawHeaders: TypeAlias = Sequence[tuple[bytes, bytes]]


def open_client(
    limits: LimitsSection,
    engine_key: str | None = None,
    *,
    keep: bool = True,
    tls: ssl.SSLContext | None = None,
) -> aiohttp.ClientSession:
    """An HTTP client for one app. It does not limit connections, and ignores cookies.

    It sends `engine_key` with every request that has no authorization of its own. `keep`: keep
    connections for the next request. `tls`: for engines with https; None trusts the system's
    authorities.
    """
    connector = Connector(
        limit=0,
        keepalive_timeout=4 if keep else None,
        force_close=not keep,
        socket_factory=_keepalive_socket,
        ssl=True if tls is None else tls,
    )
    return aiohttp.ClientSession(
        headers={"authorization": f"Bearer {engine_key}"} if engine_key else None,
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "content-type", "user-agent"),
        auto_decompress=False,  # bodies are relayed as they are, with their content-encoding
    )


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    keepalive.watch(sock)
    return sock


def to_engine(
    headers: RawHeaders, request_id: str, trace: Mapping[str, str]
) -> list[tuple[bytes, bytes]]:
    """The headers to send to an engine, from the client's (names in lower case).

    `trace`: the router's own trace context, which replaces the client's.
    """
    sent = _passed(headers, _NOT_UPSTREAM_NOR_TRACE if trace else _NOT_UPSTREAM)
    sent += [(name.encode(), value.encode()) for name, value in trace.items()]
    # Without compression, so that the router can add an error event to the stream.
    return [*sent, (b"x-request-id", request_id.encode()), (b"accept-encoding", b"identity")]


def leg_header(headers: RawHeaders) -> bytes:
    """The header fields of both legs, encoded: those of `to_engine`, with JSON as content type."""
    kept = [header for header in headers if header[0] not in _BODY_HEADERS]
    kept.append((b"content-type", b"application/json"))
    return http1.fields(kept)


def to_client(
    headers: RawHeaders, left_out: Set[bytes] = NOT_DOWNSTREAM
) -> list[tuple[bytes, bytes]]:
    """The headers to send to the client, from an engine's. Repeated headers are kept. `left_out`:
    has `NOT_DOWNSTREAM`."""
    return _passed([(name.lower(), value) for name, value in headers], left_out)


def _passed(headers: RawHeaders, left_out: Set[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers that are not in `left_out`, and do not belong to the connection because its
    `Connection` names them. `left_out` has `Connection` itself."""
    named = set[bytes]()
    passed = []
    for header in headers:
        name, value = header
        if name not in left_out:
            passed.append(header)
        elif name == b"connection" and value not in _NAME_NOTHING:
            named |= {token.strip().lower() for token in value.split(b",")}
    return [header for header in passed if header[0] not in named] if named else passed


async def post_leg(
    client: http1.Client,
    engine: EngineEndpoint,
    path: str,
    data: bytes,
    header: bytes,
    timeout_s: float,
) -> UpstreamResponse:
    """POST the JSON of a leg. Returns once the answer's head has arrived. Raises `ApiError`."""
    try:
        return await client.post(engine, path, data, header, timeout_s)
    except TimeoutError as error:
        raise _timed_out(engine.role, timeout_s) from error
    except http1.NotConnected as error:
        raise Unreachable(engine.role) from error
    except ConnectionError as error:
        raise _lost(engine.role) from error


async def post(
    client: aiohttp.ClientSession,
    engine: EngineEndpoint,
    path: str,
    data: bytes,
) -> aiohttp.ClientResponse:
    """POST JSON. Returns once the answer's head has arrived. Raises `aiohttp.ClientError`."""
    headers = {"content-type": "application/json", **engine.headers}
    return await client.post(f"{engine.url}{path}", data=data, headers=headers)


async def head(
    call: Awaitable[aiohttp.ClientResponse], timeout_s: float, role: str
) -> aiohttp.ClientResponse:
    """The answer of a call, once its head has arrived. Raises `ApiError` if it does not in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise _timed_out(role, timeout_s) from error
    except aiohttp.ClientConnectorError as error:
        raise Unreachable(role) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise _lost(role) from error


def _timed_out(role: str, timeout_s: float) -> ApiError:
    return ApiError(504, f"the {role} engine gave no answer in {timeout_s:g} s")


def _lost(role: str) -> ApiError:
    return ApiError(503, f"the {role} engine cannot be reached")
