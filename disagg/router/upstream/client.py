"""HTTP to the engines: one pooled client, and the headers that go there and back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeAlias

import aiohttp

from disagg import keepalive
from disagg.config import LimitsSection
from disagg.router.api.errors import ApiError
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import http1
from disagg.router.upstream.connector import Connector
from disagg.router.upstream.response import UpstreamResponse

# RFC 9110, 7.6.1, and what an HTTP client or server sets itself.
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
# The client's key is ours to check, not the engines' to see. `Expect` was answered by our own
# server; passed on, it would wait for an engine's.
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"content-length",
    b"host",
    b"authorization",
    b"x-api-key",
    b"accept-encoding",
    b"cookie",
    b"expect",
    b"x-request-id",
}
_TRACE = {b"traceparent", b"tracestate"}
_OF_BODY = {b"content-type", b"content-encoding"}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {b"server", b"date"}
RawHeaders: TypeAlias = Iterable[tuple[bytes, bytes]]


def open_client(
    limits: LimitsSection, engine_key: str | None = None, *, keep: bool = True
) -> aiohttp.ClientSession:
    """A client of an app's; no limit of its own on connections, and no memory of cookies.

    It shows `engine_key` with every request. `keep`: connections, for the next request.
    """
    connector = Connector(
        limit=0,
        keepalive_timeout=4 if keep else None,
        force_close=not keep,
        socket_factory=_watched,
    )
    return aiohttp.ClientSession(
        headers={"authorization": f"Bearer {engine_key}"} if engine_key else None,
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "content-type", "user-agent"),
        auto_decompress=False,  # bytes are relayed with the header that says what they are
    )


def _watched(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    keepalive.watch(sock)
    return sock


def to_engine(
    headers: RawHeaders, request_id: str, trace: Mapping[str, str]
) -> list[tuple[bytes, bytes]]:
    """The client's headers (names in lower case) as the engines get them.

    `trace`: trace context of the router's own, in place of the client's.
    """
    left_out = _NOT_UPSTREAM | _TRACE if trace else _NOT_UPSTREAM
    sent = [header for header in headers if header[0] not in left_out]
    sent += [(name.encode(), value.encode()) for name, value in trace.items()]
    # Not compressed, so that an error event fits into the stream.
    return [*sent, (b"x-request-id", request_id.encode()), (b"accept-encoding", b"identity")]


def leg_header(headers: RawHeaders) -> bytes:
    """Headers of `to_engine` as both legs send them, with JSON."""
    kept = [header for header in headers if header[0] not in _OF_BODY]
    return http1.fields([*kept, (b"content-type", b"application/json")])


def to_client(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """An engine's headers as the client gets them, repeated ones too."""
    lower = [(name.lower(), value) for name, value in headers]
    return [header for header in lower if header[0] not in _NOT_DOWNSTREAM]


async def post_leg(
    client: http1.Client,
    engine: EngineEndpoint,
    path: str,
    data: bytes,
    header: bytes,
    timeout_s: float,
) -> UpstreamResponse:
    """POST JSON, as a leg; the answer's head has come when this returns. Raises `ApiError`."""
    try:
        return await client.post(engine.url, path, data, header, timeout_s)
    except TimeoutError as error:
        raise _late(engine.role, timeout_s) from error
    except ConnectionError as error:
        raise _unreachable(engine.role) from error


async def post(
    client: aiohttp.ClientSession,
    engine: EngineEndpoint,
    path: str,
    data: bytes,
) -> aiohttp.ClientResponse:
    """POST JSON; the answer's head has come when this returns. Raises `aiohttp.ClientError`."""
    headers = {"content-type": "application/json"}
    return await client.post(f"{engine.url}{path}", data=data, headers=headers)


async def head(
    call: Awaitable[aiohttp.ClientResponse], timeout_s: float, role: str
) -> aiohttp.ClientResponse:
    """The answer that a call gives in time; raises `ApiError` otherwise."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise _late(role, timeout_s) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise _unreachable(role) from error


def _late(role: str, timeout_s: float) -> ApiError:
    return ApiError(504, f"the {role} engine gave no answer in {timeout_s:g} s")


def _unreachable(role: str) -> ApiError:
    return ApiError(503, f"the {role} engine cannot be reached")
