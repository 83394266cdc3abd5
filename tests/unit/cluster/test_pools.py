"""Which engines a deployment has."""

from __future__ import annotations

from disagg.cluster.pools import Run
from disagg.config import Deployment
from disagg.engine.args import engine_args, kv_event_endpoints


def test_the_ranks_of_a_data_parallel_group() -> None:
    """Each is an engine; vLLM itself adds the rank to the ports of KV events."""
    given = {"data_parallel_size": 3, "kv_events_config": {"enable_kv_cache_events": True}}
    pool = {"args": given, "replicas": 2}
    made = Deployment.model_validate({"model": {"path": "org/name"}, "prefill": pool})
    run = Run("run", "/tmp/kv", True, "of-leases", "of-engines")
    specs = run.specs(made)
    assert [spec.name for spec in specs] == [*(f"prefill-{n}" for n in range(6)), "decode-0"]
    assert [spec.rank for spec in specs] == [0, 1, 2, 0, 1, 2, 0]
    assert [spec.group for spec in specs[:6]] == ["prefill-0"] * 3 + ["prefill-3"] * 3
    found = [
        engine_args(spec, host="127.0.0.1", engine_id="1", meeting=("10.0.0.1", 5000))
        for spec in specs
    ]
    keys = ("data_parallel_rank", "data_parallel_address", "data_parallel_rpc_port")
    assert [[args[key] for key in keys] for args in found[:3]] == [
        [rank, "10.0.0.1", 5000] for rank in range(3)
    ]
    assert not any(key in found[6] for key in keys)
    bound = []
    for spec, args in zip(specs[:6], found, strict=False):
        port = int(args["kv_events_config"]["endpoint"].rpartition(":")[2])
        shown = kv_event_endpoints(made, "prefill", spec.index)["endpoint"]
        assert shown == f"tcp://*:{port + spec.rank}"
        bound.append(port + spec.rank)
    assert len(set(bound)) == 6
