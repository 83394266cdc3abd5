"""The load of a pool: the ranks of a data parallel group count as one engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from disagg.cluster.control import Commands
from disagg.cluster.engines import Engine
from disagg.cluster.pools import Run
from disagg.cluster.supervisor.autoscaling import PoolLoad
from disagg.cluster.supervisor.restarts import Restarts
from disagg.cluster.supervisor.scaling import Scaler
from disagg.cluster.supervisor.step import Supervisor
from disagg.config import Deployment
from disagg.engine.load import EngineLoad
from disagg.engine.spec import EngineInfo, EngineSpec

RUN = Run("run", "/tmp/kv", True, "of-leases", "of-engines")


def deployment(size: int) -> Deployment:
    pool = {"args": {"data_parallel_size": size}}
    return Deployment.model_validate({"model": {"path": "org/name"}, "decode": pool})


def serving(spec: EngineSpec, load: EngineLoad | None) -> Engine:
    info = EngineInfo(spec.name, spec.role, "http://127.0.0.1:1", 1, "node", {}, 1.0)
    return Engine(spec, None, None, 0.0, None, load=load, info=info)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({0: 2}, PoolLoad(1, 6, 0.5)),
        ({0: 2, 2: 2}, PoolLoad(2, 12, 1.0)),
        ({0: 1, 1: 1}, PoolLoad(2, 6, 1.0)),
        ({0: 1, 2: 2}, PoolLoad(2, 9, 1.0)),  # the group replaces the engine
    ],
)
def test_groups_count_as_one(sizes: Mapping[int, int], expected: PoolLoad) -> None:
    load = EngineLoad(running=2, waiting=1, kv_usage=0.5)
    engines = [
        serving(spec, load)
        for first, size in sizes.items()
        for spec in RUN.replica(deployment(size), "decode", first)
    ]
    wanted = deployment(2)

    def nothing(*_: Any) -> None:
        return None

    restarts = Restarts(engines, nothing, wanted.engine, nothing, nothing, nothing)
    for place in restarts.places:
        place.why = None
    scaler = Scaler(restarts, wanted, None, RUN.replica, nothing)
    supervisor = Supervisor(restarts, scaler, Commands(), nothing, private=True)
    assert supervisor._load("decode") == expected
