"""An engine's server lets in only who has the engines' key; what watches it may ask its health."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from disagg.config import Deployment
from disagg.engine.args import KEY_ENV, SECRET_ENV, engine_args, engine_env
from disagg.engine.routes import with_routes
from disagg.engine.spec import EngineSpec

KEY = {"authorization": "Bearer of-the-engines"}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """The server without an engine: every path of vLLM's answers."""
    monkeypatch.setenv(KEY_ENV, "of-the-engines")
    monkeypatch.setenv(SECRET_ENV, "of-the-leases")
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
    # Looked at, and refused for what it says.
    answer = engine.post("/disagg/release", headers=KEY, json={"kv_transfer_params": {}})
    assert answer.status_code == 409
    for path in ("/health", "/metrics", "/metrics/"):
        assert engine.get(path).status_code == 200


def test_the_key_is_in_the_environment_and_nowhere_else() -> None:
    deployment = Deployment.model_validate({"model": {"path": "org/name"}})
    spec = EngineSpec(deployment, "prefill", 0, "run", "/tmp/kv", True, "of-leases", "of-engines")
    assert engine_env(spec, scratch="/tmp/s")[KEY_ENV] == "of-engines"
    assert "of-engines" not in repr(engine_args(spec, host="127.0.0.1", engine_id="1"))
    assert "of-engines" not in repr(spec)


@pytest.mark.parametrize(("algorithm", "seed"), [("sha256", None), ("xxhash_cbor", "0")])
def test_engines_hash_alike(algorithm: str, seed: str | None) -> None:
    """Where vLLM takes a random seed, both are given one."""
    args = {"args": {"prefix_caching_hash_algo": algorithm}}
    deployment = Deployment.model_validate({"model": {"path": "org/name"}, "engine": args})
    spec = EngineSpec(deployment, "decode", 0, "run", "/tmp/kv", True, "of-leases", "of-engines")
    assert engine_env(spec, scratch="/tmp/s").get("PYTHONHASHSEED") == seed


@pytest.mark.parametrize("loopback", [True, False])
def test_engines_on_gpus_and_what_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch, loopback: bool
) -> None:
    found = {"model": {"path": "org/name"}, "engine": {"env": {"NCCL_SOCKET_IFNAME": "eth7"}}}

    def env(gpus: int) -> dict[str, str]:
        pools = {role: {"resources": {"num_gpus": gpus}} for role in ("prefill", "decode")}
        deployment = Deployment.model_validate(found | pools)
        spec = EngineSpec(deployment, "decode", 0, "run", "/tmp/kv", loopback, "leases", "engines")
        names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_SOCKET_IFNAME")
        made = engine_env(spec, scratch="/tmp/s")
        return {name: made[name] for name in names if name in made}

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    many = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert env(1) == many | {"NCCL_SOCKET_IFNAME": "eth7"}
    found["engine"] = {}
    assert env(1) == (many | {"NCCL_SOCKET_IFNAME": "lo"} if loopback else many)
    assert env(0) == {}
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert env(1) == {}
