"""Which node an engine prefers, and the message if no node has room."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from disagg.cluster import placing, pools
from disagg.cluster.engines import NoRoom
from disagg.cluster.placing import Node, ResourceRequest, choose, has_room, missing
from disagg.config import Deployment
from disagg.engine.spec import EngineSpec


def node(name: str, cpus: float, labels: dict[str, str] | None = None, **engines: int) -> Node:
    of_role: Counter[Any] = Counter(engines)
    return Node(name, f"10.0.0.{name}", {"CPU": cpus}, labels or {}, of_role)


def pool(cpus: float = 1, **labels: str) -> dict[str, Any]:
    return {"resources": {"num_cpus": cpus, "labels": labels}}


def ask(cpus: float = 1, **labels: str) -> ResourceRequest:
    return ResourceRequest.of(deployment(pool(cpus, **labels)), "decode")


def deployment(decode: dict[str, Any], **sections: Any) -> Deployment:
    return Deployment.model_validate({"model": {"path": "/m"}, "decode": decode, **sections})


def test_a_node_whose_raylet_is_gone_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        alive = Node("1", "127.0.0.1", {}, port=listening.getsockname()[1])
        assert alive.answers()
        assert not alive.is_gone()
    assert not alive.answers()
    assert alive.is_gone()
    never_reached = Node("1", "127.0.0.1", {}, port=alive.port)
    assert not never_reached.is_gone(), "a firewall may have refused the connection"


def test_a_silent_node_is_not_certainly_gone() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as waiting:
        silent = Node("1", "127.0.0.1", {}, port=listening.getsockname()[1])
        assert not silent.is_gone()
        for _ in range(4):  # they fill the backlog, so later connections get no answer
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        assert not silent.answers()
        assert not silent.is_gone()


def test_pairs_share_a_node_and_roles_spread() -> None:
    nodes = [node("1", 4), node("2", 4), node("3", 4)]
    placed = []
    for role in ("prefill", "prefill", "decode", "decode"):
        found = choose(ask(), role, nodes)
        assert found is not None
        found.take(ask().total, role)
        placed.append(found.node_id)
    assert len(set(placed[:2])) == 2
    assert set(placed[:2]) == set(placed[2:])


def test_room_comes_first() -> None:
    nodes = [node("1", 1, prefill=1), node("2", 4)]
    found = choose(ask(2), "decode", nodes)
    assert found is not None
    assert found.node_id == "2"
    assert choose(ask(8), "decode", nodes) is None


def test_a_node_to_avoid_is_no_choice() -> None:
    nodes = [node("1", 4), node("2", 4, decode=1)]
    found = choose(ask(), "decode", nodes, avoid="1")
    assert found is not None
    assert found.node_id == "2"
    assert choose(ask(), "decode", nodes[:1], avoid="1") is None


def test_labels() -> None:
    nodes = [node("1", 8), node("2", 2, {"gpu": "h200"})]
    found = choose(ask(gpu="h200"), "decode", nodes)
    assert found is not None
    assert found.node_id == "2"
    assert choose(ask(gpu="b200"), "decode", nodes) is None


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ("h200", [False, True, False]),
        ("!h200", [True, False, True]),
        ("in(h200, b200)", [False, True, True]),
        ("!in(h200,b200)", [True, False, False]),
        ("in(h20)", [False, False, False]),
    ],
)
def test_labels_as_ray_selects_them(wanted: str, fits: list[bool]) -> None:
    labels: list[dict[str, str]] = [{}, {"gpu": "h200"}, {"gpu": "b200"}]
    assert [node("1", 1, each).fits({}, {"gpu": wanted}) for each in labels] == fits


def test_says_what_is_missing() -> None:
    nodes = [node("1", 1), node("2", 0.5, {"zone": "a"})]
    said = missing(ask(2, zone="a"), "decode", nodes)
    for part in ("2 CPU", "zone=a", "10.0.0.1 1 CPU (other labels)", "10.0.0.2 0.5 CPU",
                 "decode.resources"):  # fmt: skip
        assert part in said


@pytest.mark.parametrize("labels", [{}, {"zone": "a"}, {"zone": "in(a,b)"}])
@pytest.mark.parametrize("placement", ["near", "spread"])
def test_nothing_is_started_on_a_node_that_does_not_answer(
    placement: str, labels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray still counts that node. The error names the resources that are missing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    zone = {"zone": "a"}
    table = [Node("1", "127.0.0.1", {"CPU": 4.0}, zone, port=port), node("2", 0.5, zone)]
    monkeypatch.setattr(placing, "nodes", lambda: table)
    made = deployment(pool(1, **labels), engine={"placement": placement})
    spec = EngineSpec(made, "decode", 0, "run", "/tmp/kv", True, "secret", "key")

    def create(spec: EngineSpec, node_id: str | None, avoid: str | None) -> Any:
        raise AssertionError(f"started on {node_id}")

    with pytest.raises(NoRoom, match=r" on one node; free: 10\.0\.0\.2 0\.5 CPU; add a node"):
        pools.launch([spec], avoid="1", create=create)


# ---- ranks on several nodes ------------------------------------------------------------------


def spread(gpus: int, **more: Any) -> ResourceRequest:
    args = {"distributed_executor_backend": "ray", "pipeline_parallel_size": gpus}
    resources = {"num_cpus": 2, "num_gpus": gpus, **more}
    return ResourceRequest.of(deployment({"resources": resources, "args": args}), "decode")


def gpus(name: str, free: float, cpus: float = 2, labels: dict[str, str] | None = None) -> Node:
    return Node(name, f"10.0.0.{name}", {"CPU": cpus, "GPU": free}, labels or {})


def test_a_bundle_for_each_rank() -> None:
    asked = spread(3, custom={"nic": 1})
    assert asked.bundles == ({"CPU": 2.0, "nic": 1.0, "GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0})
    assert asked.total == {"CPU": 2.0, "nic": 1.0, "GPU": 3.0}


def test_ranks_have_room_on_several_nodes_together() -> None:
    nodes = [gpus("1", 1), gpus("2", 2)]
    assert has_room(spread(3), nodes)
    assert choose(spread(3), "decode", nodes) is None
    assert not has_room(spread(4), nodes)
    assert not has_room(spread(3), nodes, avoid="1")
    assert not has_room(spread(3), [gpus("1", 1, cpus=0), gpus("2", 2, cpus=0)])
    assert not has_room(spread(3, labels={"zone": "a"}), nodes)
    assert [node.free["GPU"] for node in nodes] == [1, 2], "has_room took resources"


def test_says_that_ranks_may_be_on_several_nodes() -> None:
    decode = deployment({"resources": {"num_gpus": 3}})
    nodes = [gpus("1", 1), gpus("2", 2)]
    assert "distributed_executor_backend: ray" in missing(
        ResourceRequest.of(decode, "decode"), "decode", nodes
    )
    assert "ray" not in missing(ResourceRequest.of(decode, "decode"), "decode", nodes[:1])


def test_says_what_ranks_are_missing() -> None:
    said = missing(spread(4), "decode", [gpus("1", 1), gpus("2", 2)])
    for part in ("2 CPU, 4 GPU in 4 bundles, the first of 2 CPU, 1 GPU", "10.0.0.1 2 CPU, 1 GPU"):
        assert part in said
