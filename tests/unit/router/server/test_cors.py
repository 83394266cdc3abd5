"""Browsers' rules: preflights without a key, and the fields on every answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from unit.router.conftest import AS_OPERATOR, Setup
from unit.router.test_fuzz import connect, head, rest, status

from disagg.credentials import ApiKey
from disagg.testing.http import client

Make = Callable[..., Setup]
PAGE = "https://chat.example.com"
KEYS = [ApiKey("team", "of-a-team")]
WITH_KEY = {"authorization": "Bearer of-a-team"}
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
STREAM = {"model": "m", "prompt": "x", "stream": True}


def cors(**more: Any) -> dict[str, Any]:
    return {"cors": {"allowed_origins": [PAGE], **more}}


def post(setup: Setup, body: Any, **headers: str) -> httpx.Response:
    url = f"{setup.url}/v1/completions"
    return client().post(url, json=body, headers={"origin": PAGE, **headers}, timeout=20)


def fields(answer: httpx.Response) -> dict[str, str]:
    names = [name.decode().lower() for name, _ in answer.headers.raw]
    assert names.count("access-control-allow-origin") <= 1
    prefix = "access-control-"
    return {k.removeprefix(prefix): v for k, v in answer.headers.items() if k.startswith(prefix)}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/ui/state"])
def test_a_preflight_needs_no_key(make: Make, path: str) -> None:
    setup = make(section=cors(), api_keys=KEYS)
    answer = client().options(f"{setup.url}{path}", headers=ASKS)
    assert answer.status_code == 200
    said = fields(answer)
    assert said["allow-origin"] == PAGE
    assert said["allow-headers"] == ASKS["access-control-request-headers"]
    assert "POST" in said["allow-methods"]
    assert "Origin" in answer.headers["vary"]
    assert "/v1/completions" not in setup.decode.asked


@pytest.mark.parametrize(
    ("settings", "asked", "word"),
    [
        ({}, {"origin": "https://evil.example.com"}, "origin"),
        ({"allowed_methods": ["GET"]}, {}, "method"),
        ({"allowed_headers": ["x-a"]}, {}, "headers"),
    ],
)
def test_a_preflight_that_is_refused_says_why(
    make: Make, settings: dict[str, Any], asked: dict[str, str], word: str
) -> None:
    setup = make(section=cors(**settings))
    answer = client().options(f"{setup.url}/v1/completions", headers={**ASKS, **asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"Disallowed CORS {word} (router.cors)"


def test_answers_streams_and_errors_have_the_fields(make: Make) -> None:
    setup = make(
        section=cors(), api_keys=KEYS, limits={"max_body_bytes": 1000, "queue_timeout_s": 0.3}
    )
    answers = {
        200: post(setup, {**STREAM, "stream": False}, **WITH_KEY),
        401: post(setup, STREAM),
        400: post(setup, [], **WITH_KEY),
        413: post(setup, {"prompt": "x" * 2000}, **WITH_KEY),
    }
    for code, answer in answers.items():
        assert answer.status_code == code
        assert fields(answer) == {"allow-origin": PAGE, "expose-headers": "*"}
    stream = post(setup, STREAM, **WITH_KEY)
    assert stream.text.endswith("data: [DONE]\n\n")
    assert fields(stream)["allow-origin"] == PAGE
    setup.loop.run(setup.decode.stop())
    assert fields(post(setup, STREAM, **WITH_KEY))["allow-origin"] == PAGE


def test_a_stream_that_begins_at_prefill(make: Make) -> None:
    pairing = {"local_prefill_tokens": 0, "first_token": "prefill"}
    setup = make(section={**cors(), "pairing": pairing})
    assert fields(post(setup, STREAM))["allow-origin"] == PAGE


def test_errors_of_the_server_itself(make: Make) -> None:
    setup = make(section=cors(), limits={"receive_timeout_s": 0.3})
    origin = f"origin: {PAGE}"
    large = head("GET /v1/models HTTP/1.1", origin, *(f"x{n}: y" for n in range(1000)))
    slow = head("POST /v1/completions HTTP/1.1", origin, "content-length: 9")
    for request, code in [(large, 431), (slow, 408)]:
        with connect(setup) as connection:
            connection.sendall(request)
            answer = rest(connection)
        assert status(answer) == code
        assert f"access-control-allow-origin: {PAGE}\r\n".encode() in answer


def test_other_pages_and_programs(make: Make) -> None:
    setup = make(section=cors())
    evil = post(setup, STREAM, origin="https://evil.example.com")
    assert fields(evil) == {}
    assert evil.headers["vary"] == "Origin"
    program = client().get(f"{setup.url}/v1/models")
    assert fields(program) == {}
    assert program.headers["vary"] == "Origin"


def test_any_page(make: Make) -> None:
    setup = make(section={"cors": {"allowed_origins": ["*"]}})
    answer = post(setup, STREAM)
    assert fields(answer)["allow-origin"] == "*"
    assert "vary" not in answer.headers
    assert fields(client().options(f"{setup.url}/v1/models", headers=ASKS))["allow-origin"] == "*"


def test_credentials_need_the_page_by_name(make: Make) -> None:
    setup = make(section={"cors": {"allowed_origins": ["*"], "allow_credentials": True}})
    said = fields(post(setup, STREAM))
    assert (said["allow-origin"], said["allow-credentials"]) == (PAGE, "true")
    assert said["expose-headers"] == "x-request-id, retry-after"


def test_engines_do_not_say_who_may_read(make: Make) -> None:
    setup = make(section=cors())
    post(setup, STREAM)
    assert all("origin" not in headers for headers in setup.decode.headers)
    off = make()
    answer = client().options(f"{off.url}/v1/models", headers={**ASKS, **AS_OPERATOR})
    assert fields(answer) == {}
