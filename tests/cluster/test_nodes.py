"""Several Ray nodes: where an engine's actor is placed if one node must be avoided."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray
from ray.exceptions import RayError

from disagg.cluster import placing, pools
from disagg.config import Deployment
from disagg.engine.spec import EngineSpec
from disagg.testing.ray_nodes import ADDRESS_ENV, RayNodes

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    """Two nodes with the same label, beside the head."""
    with RayNodes(2, 2, labels={"zone": "a"}) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(namespace="nodes", log_to_driver=False)
        try:
            yield cluster
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def nodes(cluster: RayNodes) -> list[placing.Node]:
    return [node for node in placing.nodes() if node.labels.get("zone") == "a"]


@pytest.fixture(autouse=True)
def _emptied(nodes: list[placing.Node]) -> None:
    """Wait until Ray has released the resources of actors that were killed."""
    deadline, known = time.monotonic() + 20, {node.node_id for node in nodes}
    while any(n.free.get("CPU") != 2 for n in placing.nodes() if n.node_id in known):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def spec_of(index: int, labels: dict[str, str]) -> EngineSpec:
    deployment = Deployment.model_validate(
        {"model": {"path": "/m"}, "decode": {"resources": {"num_cpus": 1, "labels": labels}}}
    )
    return EngineSpec(
        deployment, "decode", index, "run", "/tmp/kv", True, "0123456789abcdef", "key"
    )


@pytest.mark.parametrize("labels", [{"zone": "a"}, {"zone": "!b"}, {}])
def test_an_engine_goes_elsewhere(nodes: list[placing.Node], labels: dict[str, str]) -> None:
    assert len(nodes) == 2, f"{ADDRESS_ENV} leads elsewhere"
    for index, (avoid, other) in enumerate([nodes, nodes[::-1]]):
        specs = [spec_of(2 * index, labels), spec_of(2 * index + 1, labels)]
        actors = [pools.create(spec, other.node_id, avoid.node_id) for spec in specs]
        try:
            homes = ray.get([actor.home.remote() for actor in actors], timeout=60)
            assert {home.node_id for home in homes} == {other.node_id}
        finally:
            for actor in actors:
                ray.kill(actor)


@pytest.mark.parametrize("labels", [{"zone": "in(a,b)"}, {}])
def test_engines_of_one_role_are_not_together(
    nodes: list[placing.Node], labels: dict[str, str]
) -> None:
    engines = pools.launch([spec_of(20 + index, labels) for index in range(2)])
    try:
        homes = [ray.get(engine.actor.home.remote(), timeout=60) for engine in engines]
        assert {home.node_id for home in homes} == {node.node_id for node in nodes}
    finally:
        for engine in engines:
            ray.kill(engine.actor)


@pytest.mark.parametrize("labels", [{"zone": "a"}, {}])
def test_room_that_was_taken_meanwhile(nodes: list[placing.Node], labels: dict[str, str]) -> None:
    """If the preferred node's room is taken, an engine runs elsewhere and does not wait."""
    full, other = nodes
    taking = [pools.create(spec_of(10 + index, labels), full.node_id) for index in range(2)]
    try:
        homes = ray.get([actor.home.remote() for actor in taking], timeout=60)
        assert {home.node_id for home in homes} == {full.node_id}
        taking.append(pools.create(spec_of(12, labels), full.node_id))
        assert ray.get(taking[-1].home.remote(), timeout=60).node_id == other.node_id
    finally:
        for actor in taking:
            ray.kill(actor)


def test_a_node_that_is_killed_is_known_to_be_gone(
    cluster: RayNodes, nodes: list[placing.Node]
) -> None:
    """Long before Ray reports it."""
    dies, lives = nodes
    actor = pools.create(spec_of(9, {}), dies.node_id)
    home = ray.get(actor.home.remote(), timeout=60)
    assert home.node_id == dies.node_id
    assert not dies.is_gone()
    assert not lives.is_gone()
    cluster.kill_node_of(home.pid)
    began = time.monotonic()
    while not dies.is_gone():
        assert time.monotonic() - began < 1
        time.sleep(0.02)
    assert not lives.is_gone()

    def ask_until_it_ends() -> None:
        for _ in range(100):
            ray.get(actor.home.remote(), timeout=10)
            time.sleep(0.1)

    with pytest.raises(RayError):
        ask_until_it_ends()
