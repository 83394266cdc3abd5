"""Several Ray nodes: where an engine or a data parallel group is placed if one must be avoided."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayError

from disagg.cluster import placing, pools
from disagg.cluster.engines import Engine
from disagg.cluster.supervisor.restarts import Restarts
from disagg.config import Deployment
from disagg.engine.spec import EngineSpec
from disagg.testing.ray_nodes import ADDRESS_ENV, RayNodes
from disagg.testing.waiting import eventually

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


def group_of(index: int) -> list[EngineSpec]:
    """A data parallel group whose ranks fill a node each. Its model is missing, so it starts
    nothing."""
    pool = {"resources": {"num_cpus": 2}, "args": {"data_parallel_size": 2}}
    deployment = Deployment.model_validate({"model": {"path": "/m"}, "decode": pool})
    return pools.Run("run", "/tmp/kv", True, "0123456789abcdef", "key").replica(
        deployment, "decode", index
    )


def watched(engines: Sequence[Engine]) -> tuple[Restarts, list[str], list[str]]:
    """Their restarts, what these say, and the names of engines that were ended for good."""
    told, removed = list[str](), list[str]()

    def create(spec: EngineSpec, node_id: str | None, avoid: str | None, deaths: int) -> Any:
        return pools.create(spec, node_id, avoid)

    restarts = Restarts(
        engines,
        lambda *_: None,
        engines[0].spec.deployment.engine,
        lambda what, _: told.append(what),
        create,
        removed.append,
    )
    return restarts, told, removed


def test_ranks_of_a_group_have_a_node_each(nodes: list[placing.Node]) -> None:
    engines = pools.launch(group_of(30))
    try:
        homes = [ray.get(engine.actor.home.remote(), timeout=60) for engine in engines]
        assert {home.node_id for home in homes} == {node.node_id for node in nodes}
        host, port = ray.get(engines[0].actor.meeting.remote(), timeout=60)
        assert (host, port > 0) == (homes[0].address, True)
    finally:
        pools.stop(engines, 0.0, 5.0)


def is_gone(engine: Engine) -> bool:
    """Whether its actor has ended."""
    try:
        ray.get(engine.actor.home.remote(), timeout=30)
    except RayActorError:
        return True
    return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_is_not_whole_is_ended(rank: int) -> None:
    """As the next supervisor finds it when one died while it made or removed the group."""
    engines = pools.launch(group_of(40 + 2 * rank))
    try:
        ray.get([engine.actor.home.remote() for engine in engines], timeout=60)
        pools.stop([engines[1 - rank]], 0.0, 5.0)
        restarts, told, removed = watched([engines[rank]])
        restarts.adopt()
        assert restarts.places == []
        assert removed == [engines[rank].name]
        assert told == [f"{engines[rank].name} alone of a data parallel group: ended"]
        # Ray kills without waiting: an actor may answer once more.
        assert eventually(lambda: is_gone(engines[rank]))
    finally:
        pools.stop(engines, 0.0, 5.0)


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


@pytest.mark.slow
def test_a_group_avoids_the_node_of_each_of_its_ranks(cluster: RayNodes) -> None:
    """And ends once, although two of its actors ended."""
    cluster.add()  # the test before killed one
    engines = pools.launch(group_of(50))
    try:
        first, second = ray.get([one.actor.home.remote() for one in engines], timeout=60)
        restarts, told, _ = watched(engines)
        restarts.check()
        cluster.kill_node_of(second.pid)
        assert eventually(lambda: restarts.check() or any(" gone" in said for said in told), 10)
        (gone,) = [said for said in told if " gone" in said]
        assert gone.startswith("engine decode-51 did not start: its node ")
        assert "; decode-50 of its data parallel group ends with it; starting it again" in gone
        assert [place.avoid for place in restarts.places] == [second.node_id] * 2
        assert first.node_id != second.node_id
    finally:
        pools.stop([place.engine for place in restarts.places], 0.0, 5.0)
