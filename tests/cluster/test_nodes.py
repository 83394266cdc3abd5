"""Several Ray nodes: where an engine's actor goes when one of them is to be avoided."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from disagg.bench.ray_nodes import ADDRESS_ENV, RayNodes
from disagg.cluster import placing, pools
from disagg.config import Deployment
from disagg.engine.spec import EngineSpec

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[placing.Node]]:
    """Two, with the same label."""
    with RayNodes(2, 2, labels={"zone": "a"}), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(namespace="nodes", log_to_driver=False)
        try:
            yield [node for node in placing.nodes() if node.labels.get("zone") == "a"]
        finally:
            ray.shutdown()


@pytest.mark.parametrize("labels", [{"zone": "a"}, {"zone": "!b"}, {}])
def test_an_engine_goes_elsewhere(nodes: list[placing.Node], labels: dict[str, str]) -> None:
    assert len(nodes) == 2, f"{ADDRESS_ENV} leads elsewhere"
    deployment = Deployment.model_validate(
        {"model": {"path": "/m"}, "decode": {"resources": {"num_cpus": 1, "labels": labels}}}
    )
    for index, (avoid, other) in enumerate([nodes, nodes[::-1]]):
        spec = EngineSpec(deployment, "decode", index, "run", "/tmp/kv", True, "secret", "key")
        actor = pools.create(spec, other.node_id, avoid.node_id)
        try:
            home = ray.get(actor.home.remote(), timeout=60)
            assert home.node_id == other.node_id
        finally:
            ray.kill(actor)
