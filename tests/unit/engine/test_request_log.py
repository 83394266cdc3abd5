"""An engine's log has the router's request ids, and nothing of the requests' content."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient

from disagg.engine.request_log import RequestLog, open_request_log


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    logger, written = logging.getLogger("disagg.requests"), io.StringIO()
    handler = logging.StreamHandler(written)
    logger.addHandler(handler)
    open_request_log(enabled=True)
    yield written
    logger.removeHandler(handler)
    open_request_log(enabled=False)


def client() -> TestClient:
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        if b"break" in await request.body():
            raise RuntimeError("a defect")
        return PlainTextResponse("an answer", 202)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return TestClient(RequestLog(app), raise_server_exceptions=False)


def read(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_one_line_for_each_request_from_the_router(lines: io.StringIO) -> None:
    engine = client()
    engine.post("/v1/completions", headers={"X-Request-Id": "a-1"}, content="the prompt")
    engine.post("/v1/completions", headers={"X-Request-Id": "a-2"}, content="break")
    engine.get("/health")
    first, second = read(lines)
    assert first.pop("total_ms") >= 0
    assert first == {"status": 202, "id": "a-1", "route": "/v1/completions"}
    assert (second["id"], second["status"]) == ("a-2", 500)
    assert "prompt" not in lines.getvalue()


def test_no_lines_if_the_routers_access_log_is_off(lines: io.StringIO) -> None:
    open_request_log(enabled=False)
    assert client().post("/v1/completions", headers={"X-Request-Id": "a-1"}).status_code == 202
    assert read(lines) == []
