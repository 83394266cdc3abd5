"""How operators' commands reach a running router: at its URL with an admin key, or at its socket.

All calls of a command use one connection: a draining router accepts no new ones.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from disagg.errors import ConfigError, DisaggError

ANSWER_S = 10.0


class OperatorClient:
    """`url` or `admin_socket`: the router. Raises ConfigError if not exactly one is given."""

    def __init__(
        self, url: str | None, admin_socket: Path | None, key_env: str | None, ca: Path | None
    ) -> None:
        self._headers = _headers(key_env)
        if (url is None) == (admin_socket is None):
            raise ConfigError("URL, --socket: give one of them")
        self._connection = (
            _connection(url, ca) if url is not None else _SocketConnection(admin_socket)
        )
        self._prefix = urlsplit(url).path.rstrip("/") if url is not None else ""
        self._where = url or admin_socket

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The router's answer. Raises DisaggError with the router's own words, or ConnectionError
        or HTTPException if the connection broke off."""
        headers, data = self._headers, None
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
            data = json.dumps(body)
        self._connection.request(method, self._prefix + path, body=data, headers=headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise DisaggError(f"{_error_message(answer, content)} (status {answer.status})")
        said: dict[str, Any] = json.loads(content)
        return said

    def unreached(self, error: OSError | HTTPException) -> DisaggError:
        """For a connection that failed."""
        return DisaggError(f"{self._where}: {error or type(error).__name__}")


def _error_message(answer: HTTPResponse, content: bytes) -> str:
    if answer.status in (401, 403):
        return "refused: send an admin key (--key-env), or use the router's own socket (--socket)"
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "not a disagg router"


def _headers(key_env: str | None) -> dict[str, str]:
    if key_env is None:
        return {}
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise ConfigError(f"--key-env: {key_env!r} — this variable holds no key; export it")
    return {"Authorization": f"Bearer {key}"}


class _SocketConnection(HTTPConnection):
    """A connection to the router's own Unix socket."""

    def __init__(self, path: Path | None) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(str(self._path))


def _connection(url: str, ca: Path | None) -> HTTPConnection:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"URL: {url!r} — not a router's URL; write http://HOST:PORT")
    if parts.scheme == "http":
        return HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(
            f"--ca: {str(ca)!r} — {error.strerror or error}; name a PEM file"
        ) from error
    return HTTPSConnection(host, port, timeout=ANSWER_S, context=context)
