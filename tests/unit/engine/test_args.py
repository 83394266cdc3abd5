"""An engine's arguments and environment."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.config import Deployment, Role, SeveralDeployments
from disagg.engine.args import KEY_ENV, engine_args, engine_env, kv_event_endpoints
from disagg.engine.spec import EngineSpec
from disagg.vllm_compat import versions


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
    found: dict[str, Any] = {"model": {"path": "org/name"}}
    found["engine"] = {"env": {"NCCL_SOCKET_IFNAME": "eth7"}}

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
    found["transfer"] = {"host": "lo"}  # an interface that is there
    assert env(1)["NCCL_SOCKET_IFNAME"] == ("lo" if loopback else "=lo")
    found["transfer"] = {"host": "192.0.2.1"}
    assert ("NCCL_SOCKET_IFNAME" in env(1)) is loopback
    del found["transfer"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert env(1) == {}


def deployment_with(**sections: Any) -> Deployment:
    return Deployment.model_validate({"model": {"path": "org/name"}, **sections})


def args_of(deployment: Deployment, role: Role, index: int = 0) -> dict[str, Any]:
    spec = EngineSpec(deployment, role, index, "run", "/tmp/kv", True, "of-leases", "of-engines")
    return engine_args(spec, host="127.0.0.1", engine_id="1")


def kv_events(**config: Any) -> dict[str, Any]:
    return {"args": {"kv_events_config": {"enable_kv_cache_events": True, **config}}}


def test_each_engine_publishes_kv_events_at_ports_of_its_own() -> None:
    given = kv_events(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558", topic="kv")
    made = deployment_with(engine=given)
    found = [
        args_of(made, role, index)["kv_events_config"]
        for index in range(2)
        for role in ("prefill", "decode")
    ]
    assert [config["endpoint"] for config in found] == [
        f"tcp://*:{port}" for port in (5557, 5559, 5561, 5563)
    ]
    assert [config["replay_endpoint"] for config in found] == [
        f"tcp://*:{port}" for port in (5558, 5560, 5562, 5564)
    ]
    assert all(config["topic"] == "kv" for config in found)


@pytest.mark.parametrize("given", [{}, {"endpoint": "tcp://*:5557"}])
def test_vllms_default_endpoint_is_numbered_too(given: dict[str, str]) -> None:
    made = deployment_with(engine=kv_events(**given))
    assert args_of(made, "decode", 3)["kv_events_config"]["endpoint"] == "tcp://*:5571"


def test_a_pool_with_an_endpoint_of_its_own_begins_there() -> None:
    made = deployment_with(
        prefill=kv_events(endpoint="tcp://*:6000"), decode=kv_events(endpoint="tcp://*:7000")
    )
    assert kv_event_endpoints(made, "prefill", 0) == {"endpoint": "tcp://*:6000"}
    assert kv_event_endpoints(made, "decode", 0) == {"endpoint": "tcp://*:7000"}
    assert kv_event_endpoints(made, "decode", 1) == {"endpoint": "tcp://*:7004"}
    alone = deployment_with(decode=kv_events())
    assert kv_event_endpoints(alone, "decode", 0) == {"endpoint": "tcp://*:5557"}
    assert kv_event_endpoints(alone, "prefill", 0) == {}


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:0", "tcp://*:0"),  # any free port
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),  # vLLM connects to a collector
        ("inproc://cache", "inproc://cache"),  # within the engine's process
        ("tcp://[::]:5557", "tcp://[::]:5559"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv.decode-0"),
    ],
)
def test_only_an_address_that_engines_would_share_is_changed(endpoint: str, expected: str) -> None:
    made = deployment_with(engine=kv_events(endpoint=endpoint))
    assert args_of(made, "decode")["kv_events_config"]["endpoint"] == expected


def test_kv_events_that_are_off_remain_as_given() -> None:
    for config in ({"endpoint": "tcp://*:1"}, {"enable_kv_cache_events": False}):
        made = deployment_with(engine={"args": {"kv_events_config": config}})
        assert args_of(made, "decode", 1)["kv_events_config"] == config


def test_json_text_is_read_as_vllm_reads_it() -> None:
    text = json.dumps(kv_events()["args"]["kv_events_config"])
    made = deployment_with(engine={"args": {"kv_events_config": text}})
    assert args_of(made, "decode")["kv_events_config"]["endpoint"] == "tcp://*:5559"


def test_each_engine_writes_traces_to_a_folder_of_its_own() -> None:
    args = {
        "profiler_config": {"profiler": "torch", "torch_profiler_dir": "/traces"},
        "compilation_config": {"debug_dump_path": "/dumps", "mode": 0},
    }
    made = args_of(deployment_with(engine={"args": args}), "prefill", 2)
    assert made["profiler_config"]["torch_profiler_dir"] == "/traces/prefill-2"
    assert made["compilation_config"] == {"debug_dump_path": "/dumps/prefill-2", "mode": 0}


def test_bytes_of_the_cache_that_the_user_sets_on_a_cpu_count() -> None:
    """vLLM's VLLM_CPU_KVCACHE_SPACE overrides `kv_cache_memory_bytes`."""
    for args, expected in (({}, "1"), ({"kv_cache_memory_bytes": "2G"}, None)):
        spec = EngineSpec(
            deployment_with(engine={"args": args}), "decode", 0, "run", "/tmp", True, "s", "k"
        )
        assert engine_env(spec, scratch="/tmp/s").get("VLLM_CPU_KVCACHE_SPACE") == expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_that_the_router_hears_publish_kv_events(role: Role) -> None:
    """At a port that vLLM chooses, which it tells since 0.31."""
    router = {"pairing": {role: "cache_aware"}}
    made = deployment_with(router=router)
    expected = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
    }
    roles: tuple[Role, ...] = ("prefill", "decode")
    for each in roles:
        found = args_of(made, each).get("kv_events_config")
        assert found == (expected if each == role and versions.matches(">=0.31") else None)
    own = deployment_with(router=router, **{role: kv_events(endpoint="tcp://*:6000")})
    assert args_of(own, role)["kv_events_config"]["endpoint"] == "tcp://*:6000"


def test_each_deployment_has_its_own_pairing() -> None:
    several = SeveralDeployments.model_validate(
        {
            "router": {"pairing": {"decode": "round_robin"}},
            "deployments": [
                {"name": "a", "model": {"path": "a"}, "pairing": {"prefill": "cache_aware"}},
                {"name": "b", "model": {"path": "b"}},
            ],
        }
    )
    one, other = several.each()
    assert (one.pairing.prefill, one.pairing.decode) == ("cache_aware", "round_robin")
    assert (other.pairing.prefill, other.pairing.decode) == ("least_loaded", "round_robin")


@pytest.mark.skipif(versions.matches("<0.31"), reason="engines that the router hears tell where")
def test_on_one_machine_kv_events_stay_in_the_engines_folder() -> None:
    """They have the prompts' token ids, and every user of a machine reaches its ports."""
    made = deployment_with(router={"pairing": {"prefill": "cache_aware"}})
    for loopback in (True, False):
        spec = EngineSpec(made, "prefill", 0, "run", "/tmp/kv", loopback, "leases", "engines")
        args = engine_args(spec, host="127.0.0.1", engine_id="1", scratch="/tmp/s")
        endpoints = [args["kv_events_config"][key] for key in ("endpoint", "replay_endpoint")]
        own = ["ipc:///tmp/s/inproc-endpoint", "ipc:///tmp/s/inproc-replay_endpoint"]
        assert endpoints == (own if loopback else ["tcp://*:0"] * 2)


INTERFACES = {
    "lo": [SimpleNamespace(address="127.0.0.1"), SimpleNamespace(address="::1")],
    "net7": [SimpleNamespace(address="192.0.2.7"), SimpleNamespace(address="fe80::7%net7")],
}


def test_where_gloo_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on this host meet at loopback; those of a group at the interface that hosts see."""
    name = "GLOO_SOCKET_IFNAME"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: INTERFACES)

    def env(ranks: int, loopback: bool, address: str | None, **args: Any) -> str | None:
        pool = {"args": {"data_parallel_size": ranks, **args}}
        deployment = Deployment.model_validate({"model": {"path": "org/name"}, "decode": pool})
        spec = EngineSpec(deployment, "decode", 0, "run", "/tmp/kv", loopback, "leases", "engines")
        return engine_env(spec, scratch="/tmp/s", address=address).get(name)

    assert env(2, False, "192.0.2.7") == "net7"
    assert env(2, False, "fe80::7") == "net7"
    assert env(2, False, "192.0.2.9") is None
    assert env(2, True, "127.0.0.1") == "lo"
    assert env(1, False, "192.0.2.7") == "lo"
    assert env(1, False, "192.0.2.7", distributed_executor_backend="ray") is None
    assert env(2, False, None) is None
    monkeypatch.setenv(name, "eth7")
    assert env(2, False, "192.0.2.7") is None
