"""`disagg drain`: ask a running router to refuse new requests; optionally wait for the rest.

All calls use one connection: a draining router accepts no new ones.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from disagg.errors import ConfigError, DisaggError
from disagg.router.server.drain import PATH

ANSWER_S = 10.0
POLL_S = 0.2


def run(
    url: str | None,
    *,
    admin_socket: Path | None,
    key_env: str | None,
    ca: Path | None,
    wait: bool,
    undo: bool,
    timeout_s: float,
) -> int:
    """Start or undo a drain, print its state, wait if asked. Returns 0; raises DisaggError.

    The router is reached at its URL, with an admin key, or at its own socket.
    """
    headers = _headers(key_env)
    if (url is None) == (admin_socket is None):
        raise ConfigError("URL, --socket: give one of them")
    connection = _connection(url, ca) if url is not None else _SocketConnection(admin_socket)
    try:
        state = _ask(connection, "DELETE" if undo else "POST", headers)
        print(_summary(state), flush=True)
        if wait and not undo:
            _wait(connection, headers, state, timeout_s)
            print("drained")
    except (OSError, HTTPException) as error:
        raise DisaggError(f"{url or admin_socket}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    return 0


def _wait(
    connection: HTTPConnection, headers: dict[str, str], state: dict[str, Any], timeout_s: float
) -> None:
    """Return when no request is in flight, or when the router has exited, as it then does."""
    deadline = time.monotonic() + timeout_s
    while state["in_flight"]:
        if time.monotonic() > deadline:
            raise DisaggError(f"not drained in {timeout_s:g} s; {_summary(state)}")
        time.sleep(POLL_S)
        try:
            state = _ask(connection, "GET", headers)
        except (ConnectionError, HTTPException):
            return


def _ask(connection: HTTPConnection, method: str, headers: dict[str, str]) -> dict[str, Any]:
    connection.request(method, PATH, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise DisaggError(f"{_error_message(answer, content)} (status {answer.status})")
    state: dict[str, Any] = json.loads(content)
    return state


def _error_message(answer: HTTPResponse, content: bytes) -> str:
    if answer.status in (401, 403):
        return "refused: send an admin key (--key-env), or use the router's own socket (--socket)"
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "not a disagg router"


def _summary(state: dict[str, Any]) -> str:
    mode = "draining" if state["draining"] else "taking requests"
    return f"{mode}, {state['in_flight']} in flight"


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
