"""One path, however it is written: a slash at its end, and a proxy's prefix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from unit.router.conftest import AS_OPERATOR, Setup
from unit.router.test_fuzz import connect, head, rest, status

from disagg.config import RouterSection
from disagg.testing.http import client

Make = Callable[..., Setup]
BODY = {"model": "m", "prompt": "x"}


def get(setup: Setup, target: str) -> bytes:
    with connect(setup) as connection:
        connection.sendall(head(f"GET {target} HTTP/1.1", "connection: close"))
        return rest(connection)


def test_a_slash_at_the_end(setup: Setup) -> None:
    answer = client().post(f"{setup.url}/v1/completions/", json=BODY)
    assert (answer.status_code, len(answer.history)) == (200, 0)
    assert len(setup.prefill.bodies) == 1  # handed off
    assert client().get(f"{setup.url}/v1/models/?a=/").json()["path"] == "/v1/models?a=/"
    for path in ("/health/", "/ready/", "/metrics/", "/ui/"):
        assert client().get(f"{setup.url}{path}").status_code == 200
    drain = client().post(f"{setup.url}/disagg/drain/", headers=AS_OPERATOR)
    assert drain.json()["draining"]


@pytest.mark.parametrize("target", ["/v1/models%2F", "/v1/models//", "//", "/disagg/release/"])
def test_other_paths_stay_others(setup: Setup, target: str) -> None:
    assert status(get(setup, target)) in (403, 404)


@pytest.mark.parametrize("prefix", ["/llm", "/a/llm-1"])
def test_a_root_path(make: Make, prefix: str) -> None:
    setup = make(section={"root_path": prefix})
    for base in (setup.url, f"{setup.url}{prefix}"):  # the proxy takes the prefix off, or not
        assert client().post(f"{base}/v1/completions", json=BODY).status_code == 200
        assert client().get(f"{base}/v1/models?q=1").json()["path"] == "/v1/models?q=1"
        assert client().get(f"{base}/health").status_code == 200
        assert client().get(f"{base}/openapi.json").json()["servers"] == [{"url": prefix}]
    assert len(setup.prefill.bodies) == 2


def test_a_root_path_opens_no_other_path(make: Make) -> None:
    setup = make(section={"root_path": "/llm"})
    for target in ("/llm/disagg/release", "/llm/sleep", "/llmx/v1/models", "/%6clm/v1/models"):
        assert status(get(setup, target)) in (403, 404), target
    assert status(get(setup, "/llm/llm/v1/models")) == 403
    assert set(setup.decode.asked) <= {"/health", "/version", "/disagg/fingerprint"}


@pytest.mark.parametrize("path", ["llm", "/llm/", "/a b", "/%6c", "/v1", "/v1/x"])
def test_a_root_path_that_is_none(path: str) -> None:
    with pytest.raises(ValueError, match="root_path"):
        RouterSection(root_path=path)


HANDSHAKE = [
    "connection: Upgrade",
    "upgrade: websocket",
    "sec-websocket-version: 13",
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
]


def test_websockets_are_refused_by_name(setup: Setup) -> None:
    request = head("GET /v1/realtime?model=m HTTP/1.1", *HANDSHAKE)
    with connect(setup) as connection:
        connection.sendall(request)
        answer = connection.recv(4096)
        assert status(answer) == 501
        assert b'"code":501' in answer
        assert b"does not relay WebSockets" in answer
        # The bytes behind it are requests.
        connection.sendall(head("GET /health HTTP/1.1", "connection: close"))
        assert status(rest(connection)) == 200


def test_headers_of_the_connection_stay_here(setup: Setup) -> None:
    answer = client().post(
        f"{setup.url}/v1/completions",
        json=BODY,
        headers={"connection": "X-Secret, keep-alive", "x-secret": "s", "x-kept": "k"},
    )
    assert answer.status_code == 200
    for engine in (setup.prefill, setup.decode):
        assert "x-secret" not in engine.headers[0]
        assert engine.headers[0]["x-kept"] == "k"


def test_headers_of_an_engines_connection_stay_at_the_router() -> None:
    from disagg.router.upstream.client import to_client

    raw = [(b"Connection", b"keep-alive, X-Hop"), (b"x-hop", b"1"), (b"X-Other", b"2")]
    assert to_client(raw) == [(b"x-other", b"2")]
