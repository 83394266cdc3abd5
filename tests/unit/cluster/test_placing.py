"""Which node is preferred, and what is said when none will do."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

from disagg.cluster import placing, pools
from disagg.cluster.engines import NoRoom
from disagg.cluster.placing import Node, choose, missing, resources
from disagg.config import Deployment, PoolSection
from disagg.engine.spec import EngineSpec


def node(name: str, cpus: float, labels: dict[str, str] | None = None, **engines: int) -> Node:
    of_role: Counter[Any] = Counter(engines)
    return Node(name, f"10.0.0.{name}", {"CPU": cpus}, labels or {}, of_role)


def pool(cpus: float = 1, **labels: str) -> PoolSection:
    return PoolSection.model_validate({"resources": {"num_cpus": cpus, "labels": labels}})


def test_a_node_whose_raylet_is_gone_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        alive = Node("1", "127.0.0.1", {}, port=listening.getsockname()[1])
        assert alive.answers()
        assert not alive.is_gone()
    assert not alive.answers()
    assert alive.is_gone()
    never_reached = Node("1", "127.0.0.1", {}, port=alive.port)
    assert not never_reached.is_gone(), "a firewall may have said that"


def test_a_node_that_says_nothing_is_not_known_to_be_gone() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as waiting:
        silent = Node("1", "127.0.0.1", {}, port=listening.getsockname()[1])
        assert not silent.is_gone()
        for _ in range(4):  # who would wait with these is never heard
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        assert not silent.answers()
        assert not silent.is_gone()


def test_pairs_share_a_node_and_roles_spread() -> None:
    nodes = [node("1", 4), node("2", 4), node("3", 4)]
    placed = []
    for role in ("prefill", "prefill", "decode", "decode"):
        found = choose(pool(), role, nodes)  # type: ignore[arg-type]
        assert found is not None
        found.take(resources(pool()), role)  # type: ignore[arg-type]
        placed.append(found.node_id)
    assert len(set(placed[:2])) == 2
    assert set(placed[:2]) == set(placed[2:])


def test_room_comes_first() -> None:
    nodes = [node("1", 1, prefill=1), node("2", 4)]
    found = choose(pool(2), "decode", nodes)
    assert found is not None
    assert found.node_id == "2"
    assert choose(pool(8), "decode", nodes) is None


def test_a_node_to_avoid_is_no_choice() -> None:
    nodes = [node("1", 4), node("2", 4, decode=1)]
    found = choose(pool(), "decode", nodes, avoid="1")
    assert found is not None
    assert found.node_id == "2"
    assert choose(pool(), "decode", nodes[:1], avoid="1") is None


def test_labels() -> None:
    nodes = [node("1", 8), node("2", 2, {"gpu": "h200"})]
    found = choose(pool(gpu="h200"), "decode", nodes)
    assert found is not None
    assert found.node_id == "2"
    assert choose(pool(gpu="b200"), "decode", nodes) is None


def test_says_what_is_missing() -> None:
    nodes = [node("1", 1), node("2", 0.5, {"zone": "a"})]
    said = missing(pool(2, zone="a"), "decode", nodes)
    for part in ("2 CPU", "zone=a", "10.0.0.1 1 CPU (other labels)", "10.0.0.2 0.5 CPU",
                 "decode.resources"):  # fmt: skip
        assert part in said


@pytest.mark.parametrize("labels", [{}, {"zone": "a"}, {"zone": "in(a,b)"}])
@pytest.mark.parametrize("placement", ["near", "spread"])
def test_nothing_is_started_on_a_node_that_does_not_answer(
    placement: str, labels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray still counts it; whoever waits hears what for."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    zone = {"zone": "a"}
    table = [Node("1", "127.0.0.1", {"CPU": 4.0}, zone, port=port), node("2", 0.5, zone)]
    monkeypatch.setattr(placing, "nodes", lambda: table)
    made = Deployment.model_validate(
        {
            "model": {"path": "/m"},
            "engine": {"placement": placement},
            "decode": pool(**labels).model_dump(),
        }
    )
    spec = EngineSpec(made, "decode", 0, "run", "/tmp/kv", True, "secret", "key")

    def create(spec: EngineSpec, node_id: str | None, avoid: str | None) -> Any:
        raise AssertionError(f"started on {node_id}")

    with pytest.raises(NoRoom, match=r" on one node; free: 10\.0\.0\.2 0\.5 CPU; add a node"):
        pools.launch([spec], avoid="1", create=create)
