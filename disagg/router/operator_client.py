"""How commands reach a running router: at its URL with a key, or at its socket without one.

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
from disagg.local import running

ANSWER_S = 10.0
DEFAULT_URL = "http://127.0.0.1:8000"


def locate(where: str | None) -> str:
    """The URL or the socket's path of a router: of a deployment with this name on this machine, or
    what `where` is already. Without `where`, of the only deployment here, or else `DEFAULT_URL`.

    Raises ConfigError for a name that no deployment here has.
    """
    if where is not None and (":" in where or "/" in where):
        return where
    if where is None and not running.running():
        return DEFAULT_URL
    found = running.find(where)
    if not found.url:
        raise ConfigError(f"{found.name} starts; try again when `disagg ls` shows that it serves")
    return found.socket or found.url


class OperatorClient:
    """`where`: see `locate`. `key_env`: the variable with the key that is shown. `ca`: PEM
    certificates to trust. Raises ConfigError."""

    def __init__(self, where: str | None, key_env: str | None, ca: Path | None) -> None:
        self._headers = _headers(key_env)
        self.where = locate(where)
        if ":" in self.where:
            self._connection = _connection(self.where, ca)
            self._prefix = urlsplit(self.where).path.rstrip("/")
        else:
            self._connection = _SocketConnection(Path(self.where).expanduser())
            self._prefix = ""

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next call opens another."""
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
        return DisaggError(f"{self.where}: {error or type(error).__name__}")


def _error_message(answer: HTTPResponse, content: bytes) -> str:
    if answer.status in (401, 403):
        return "refused: send an admin key (--key-env), or name the deployment or its socket"
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

    def __init__(self, path: Path) -> None:
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
        raise ConfigError(f"WHERE: {url!r} — not a router's URL; write http://HOST:PORT")
    if parts.scheme == "http":
        return HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(
            f"--ca: {str(ca)!r} — {error.strerror or error}; name a PEM file"
        ) from error
    return HTTPSConnection(host, port, timeout=ANSWER_S, context=context)
