"""An engine's arguments and environment."""

from __future__ import annotations

import pytest

from disagg.config import Deployment
from disagg.engine.args import KEY_ENV, engine_args, engine_env
from disagg.engine.spec import EngineSpec


def test_the_key_is_in_the_environment_and_nowhere_else() -> None:
    deployment = Deployment.model_validate({"model": {"path": "org/name"}})
    spec = EngineSpec(deployment, "prefill", 0, "run", "/tmp/kv", True, "of-leases", "of-engines")
    assert engine_env(spec, scratch="/tmp/s")[KEY_ENV] == "of-engines"
    assert "of-engines" not in repr(engine_args(spec, host="127.0.0.1", engine_id="1"))
    assert "of-engines" not in repr(spec)


@pytest.mark.parametrize(("algorithm", "seed"), [("sha256", None), ("xxhash_cbor", "0")])
def test_engines_hash_alike(algorithm: str, seed: str | None) -> None:
    """Where vLLM would hash with a random seed, both engines get the same seed."""
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
