"""The bytes of bodies are given back however a request ends; warnings are few."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from unit.router.conftest import Setup, wait_for

from disagg.testing.http import client

Make = Callable[..., Setup]
MIB = 1 << 20


def held(setup: Setup) -> int:
    protocol: Any = setup.server._server.config.http_protocol_class
    return int(protocol.bodies.bytes)


def connect(setup: Setup, announced: int, path: str = "/v1/completions") -> socket.socket:
    """A client that begins to send a body."""
    host, port = setup.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {announced}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def test_a_client_that_leaves_gives_its_bytes_back(setup: Setup) -> None:
    with connect(setup, 9 * MIB) as connection:
        connection.sendall(b"x" * MIB)
        assert wait_for(lambda: held(setup) == MIB)
    assert wait_for(lambda: held(setup) == 0)


def test_a_large_body_counts_until_its_answer(setup: Setup) -> None:
    setup.decode.gate = threading.Event()
    body = {"model": "m", "prompt": "x" * MIB}
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            client().post(f"{setup.url}/v1/completions", json=body, timeout=20)
        )
    )
    asking.start()
    assert wait_for(lambda: len(setup.decode.bodies) == 1)
    assert held(setup) > MIB
    setup.decode.gate.set()
    asking.join()
    assert answers[0].status_code == 200
    assert wait_for(lambda: held(setup) == 0)


def test_a_small_body_counts_until_it_has_arrived(setup: Setup) -> None:
    setup.decode.gate = threading.Event()
    body = b'{"model":"m","prompt":"x"}'
    with connect(setup, len(body)) as connection:
        connection.sendall(body[:-1])
        assert wait_for(lambda: held(setup) == len(body) - 1)
        connection.sendall(body[-1:])
        assert wait_for(lambda: len(setup.decode.bodies) == 1)
        assert held(setup) == 0
        setup.decode.gate.set()
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("body", [b"[" * MIB, b" " * (3 * MIB)])
def test_a_refused_body_is_given_back(make: Make, body: bytes) -> None:
    setup = make(limits={"max_body_bytes": 2 * MIB})
    with connect(setup, len(body)) as connection:
        connection.sendall(body)
        assert connection.recv(4096).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
        assert wait_for(lambda: held(setup) == 0)


def test_a_body_over_the_limit_is_counted_as_503(make: Make) -> None:
    setup = make(limits={"max_receiving_bytes": MIB, "max_body_bytes": MIB})
    with connect(setup, MIB) as first, connect(setup, MIB) as second:
        first.sendall(b"x" * (MIB - 1))
        assert wait_for(lambda: held(setup) == MIB - 1)
        second.sendall(b"x" * (MIB // 2))
        answer = second.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in answer
        assert held(setup) == MIB - 1
        assert client().get(f"{setup.url}/health").status_code == 200
    line = 'disagg_router_requests_total{route="/v1/completions",status="503"} 1.0'
    assert wait_for(lambda: line in client().get(f"{setup.url}/metrics").text)
    assert wait_for(lambda: held(setup) == 0)
