"""Checks of several deployments of one file, and their plan."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from disagg.cluster import pools
from disagg.config import Deployment, SeveralDeployments
from disagg.errors import ConfigError
from disagg.preflight import checks, memory_checks
from disagg.preflight.resolved_plan import resolve, resolve_all


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores and 24 GiB, on which the engines run."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(memory_checks, "machine_bytes", lambda: 24 << 30)
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def several(*entries: dict[str, Any], **router: Any) -> list[Deployment]:
    names = ("chat", "code", "embed")
    return SeveralDeployments.model_validate(
        {
            "deployments": [
                {"name": name, "model": {"path": f"org/{name}"}, **entry}
                for name, entry in zip(names, entries, strict=False)
            ],
            "router": {"port": 0, **router},
        }
    ).each()


def problems(*deployments: Deployment) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checks.check(*deployments)
    return caught.value.problems


def test_a_problem_has_the_place_of_its_deployment() -> None:
    gpu = {"resources": {"num_gpus": 1}}
    lines = problems(*several({"decode": gpu}, {"engine": {"args": {"block_size": 0}}}))
    assert [line.partition(":")[0] for line in lines] == [
        "deployments.0.prefill.resources.num_gpus, decode.resources.num_gpus",
        "deployments.1.engine.args.block_size",
    ]


def test_a_problem_of_the_router_comes_once_and_without_place() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (line,) = problems(*several({}, {}, port=server.getsockname()[1]))
    assert line.startswith("router.port: ")


def test_engines_are_summed_over_deployments() -> None:
    def space(gib: int) -> dict[str, Any]:
        return {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": gib}}}

    fitting = several(space(5), space(5))
    assert not any("this machine has" in line for line in checks.check(*fitting))
    too_much = checks.check(*several(space(7), space(7)))
    assert [line for line in too_much if "take 28.0 GiB together" in line]
    five = {"decode": {"replicas": 4}}
    assert any("ask for 10 CPUs" in line for line in checks.check(*several(five, five)))


def test_resources_of_ray_are_summed() -> None:
    gpu = {"resources": {"num_gpus": 1}}
    pair = {"prefill": gpu, "decode": gpu}
    two = several(pair, pair)
    assert pools.shortfalls(two, {"CPU": 4, "GPU": 4}) == []
    (line,) = pools.shortfalls(two, {"CPU": 4, "GPU": 2})
    assert line.startswith("the engines ask for 4 GPU, this machine has 2;")


def test_gpus_are_counted_over_all_deployments(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"resources": {"num_gpus": 1}}
    two = several({"prefill": gpu, "decode": gpu}, {"prefill": gpu, "decode": gpu})
    for there, said in ((4, False), (2, True)):
        monkeypatch.setattr(memory_checks, "gpus", lambda there=there: [80 << 30] * there)
        lines = [line for line in memory_checks.memory_warnings(two) if "GPUs" in line]
        assert bool(lines) is said
    assert "of all deployments: the engines ask for 4 GPUs, and this machine has 2;" in lines[0]


def test_two_deployments_cannot_publish_at_one_port() -> None:
    def events(port: int) -> dict[str, Any]:
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
        return {"decode": {"args": {"kv_events_config": config}}}

    checks.check(*several(events(15557), events(15561)))
    (line,) = problems(*several(events(15557), events(15557)))
    assert line.startswith("deployments.1.decode.args.kv_events_config.endpoint: ")
    assert "code/decode-0 and chat/decode-0 would both listen on tcp://*:15557" in line


def test_the_plan_has_each_deployment_and_one_router() -> None:
    chat, code = several({"limits": {"max_queued": 7}}, {"decode": {"replicas": 3}})
    plan = resolve_all([chat, code])
    assert list(plan) == ["deployments", "router"]
    first, second = plan["deployments"]
    assert (first["name"], second["name"]) == ("chat", "code")
    assert second["decode"]["replicas"] == 3
    assert (first["limits"]["max_queued"], second["limits"]["max_queued"]) == (7, 1024)
    assert "router" not in first
    alone = Deployment.model_validate({"model": {"path": "org/name"}})
    assert resolve_all([alone]) == resolve(alone)
