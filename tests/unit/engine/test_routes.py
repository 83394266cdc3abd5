"""An engine's server requires the engines' key, except for health and metrics."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from disagg.engine.args import KEY_ENV, SECRET_ENV
from disagg.engine.routes import with_routes

KEY = {"authorization": "Bearer of-the-engines"}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """The server without an engine. Every path of vLLM answers."""
    monkeypatch.setenv(KEY_ENV, "of-the-engines")
    monkeypatch.setenv(SECRET_ENV, "the secret of the leases")
    app = FastAPI()
    server = with_routes(app)

    @app.api_route("/{rest:path}", methods=["GET", "POST"])
    async def anything(rest: str) -> str:
        return rest

    return TestClient(server)


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/pooling", "/disagg/release"])
@pytest.mark.parametrize("shown", [None, "Bearer wrong", "Basic of-the-engines", "Bearer "])
def test_without_the_key_nothing_is_done(engine: TestClient, path: str, shown: str | None) -> None:
    headers = {"authorization": shown} if shown else {}
    answer = engine.post(path, headers=headers, json={"kv_transfer_params": {}})
    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})


def test_with_the_key_and_for_health_all_is_as_before(engine: TestClient) -> None:
    assert engine.get("/v1/models", headers=KEY).json() == "v1/models"
    # The route gets the request, and refuses its content.
    answer = engine.post("/disagg/release", headers=KEY, json={"kv_transfer_params": {}})
    assert answer.status_code == 409
    for path in ("/health", "/metrics", "/metrics/"):
        assert engine.get(path).status_code == 200
