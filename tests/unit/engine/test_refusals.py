"""vLLM's refusals in our users' words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from disagg.engine.refusals import Refusals

TOOLS = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
WORDED = (
    '"auto" tool choice requires engine.args.enable_auto_tool_choice and '
    "engine.args.tool_call_parser to be set"
)


def error(message: object) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}


ANSWERS = {
    "tools": JSONResponse(error(TOOLS), 400),
    "other": JSONResponse(error("3 -- 4 and a--b"), 400),
    "odd": JSONResponse(error(None), 400),
    "list": JSONResponse([1], 400),
    "detail": JSONResponse({"detail": "no such adapter"}, 404),
    "text": Response(TOOLS, 400, media_type="text/plain"),
    "broken": Response("{", 500, media_type="application/json"),
    "fine": JSONResponse(error(TOOLS), 200),
}


async def ask(method: str, path: str) -> httpx.Response:
    app = FastAPI(openapi_url=None)

    @app.post("/v1/{name}")
    async def answer(name: str) -> Response:
        return ANSWERS[name] if name in ANSWERS else Response(status_code=204)

    @app.get("/stream")
    async def stream() -> Response:
        async def pieces() -> Any:
            for _ in range(4):
                yield b"x" * (32 << 10)

        return StreamingResponse(pieces(), 500, media_type="application/json")

    transport = httpx.ASGITransport(Refusals(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        return await client.request(method, path)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = pytest.mark.anyio


async def test_options_are_named_as_in_the_yaml() -> None:
    answer = await ask("POST", "/v1/tools")
    assert (answer.status_code, answer.json()) == (400, error(WORDED))
    assert answer.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/v1x/embeddings", 404), ("PUT", "/v1/tools", 405)]
)
async def test_what_is_not_served_has_openai_s_shape(method: str, path: str, status: int) -> None:
    answer = await ask(method, path)
    found = answer.json()["error"]
    assert (answer.status_code, found["code"], found["param"]) == (status, status, None)
    assert found["message"] == f"{method} {path}: not served with this model by its engines"


@pytest.mark.parametrize("name", ["other", "odd", "list", "detail", "text", "broken", "fine"])
async def test_all_else_passes_untouched(name: str) -> None:
    answer, expected = await ask("POST", f"/v1/{name}"), ANSWERS[name]
    assert (answer.status_code, answer.content) == (expected.status_code, expected.body)


async def test_a_large_refusal_passes_in_pieces() -> None:
    answer = await ask("GET", "/stream")
    assert (answer.status_code, len(answer.content)) == (500, 4 * (32 << 10))
