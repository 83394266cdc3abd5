"""Memory that this machine does not have, and caches that are too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.preflight.deployments import deployment_with, make_checkpoint, problems_of

from disagg.preflight import checks, memory_checks

GPU = {"resources": {"num_gpus": 1}}


@pytest.fixture(autouse=True)
def a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(memory_checks, "machine_bytes", lambda: 24 << 30)
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def space(gib: int) -> dict[str, Any]:
    return {"env": {"VLLM_CPU_KVCACHE_SPACE": gib}}


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    assert problems_of(engine=space(4000)) == [
        "engine.env.VLLM_CPU_KVCACHE_SPACE: '4000' (GiB) — an engine would take 4,000.0 GiB, and "
        "this machine has 24.0 GiB; lower it; for a cluster with larger nodes, set RAY_ADDRESS"
    ]
    (line,) = problems_of(decode={"args": {"kv_cache_memory_bytes": "4000G"}})
    assert line.startswith("decode.args.kv_cache_memory_bytes: '4000G' — an engine would")
    (line,) = problems_of(decode={"args": {"tensor_parallel_size": 4}, **space(7)})
    assert "4 ranks of an engine would take 28.0 GiB" in line


def test_a_cache_larger_than_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(memory_checks, "_GPU", str(tmp_path / "gpu"))
    monkeypatch.setattr(memory_checks, "gpu_bytes", lambda: 80 << 30)
    pools = {"prefill": GPU, "decode": GPU}
    assert problems_of(engine={"args": {"kv_cache_memory_bytes": "4000G"}}, **pools) == [
        "engine.args.kv_cache_memory_bytes: '4000G' — of each rank, and this machine's GPUs have "
        "80.0 GiB; lower it; for a cluster with larger nodes, set RAY_ADDRESS"
    ]
    checks.check(deployment_with(engine={"args": {"kv_cache_memory_bytes": "40G"}}, **pools))
    monkeypatch.setattr(memory_checks, "gpu_bytes", lambda: None)
    checks.check(deployment_with(engine={"args": {"kv_cache_memory_bytes": "4000G"}}, **pools))


def test_caches_that_fit_pass() -> None:
    checks.check(deployment_with(engine=space(24)))
    checks.check(deployment_with(engine={"args": {"kv_cache_memory_bytes": "24G"}}))
    checks.check(deployment_with())


def test_a_clusters_nodes_may_be_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_engines = {"engine": {"args": {"kv_cache_memory_bytes": "40G"}}, "decode": GPU}
    host = {"host": {"max_bytes": 64 << 30}}
    monkeypatch.setattr(memory_checks, "_GPU", "/dev/none")
    warnings = checks.check(deployment_with(**gpu_engines, prefill=GPU, tiers=host))
    assert not any("this machine has" in line for line in warnings)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    warnings = checks.check(deployment_with(engine=space(4000), tiers=host))
    assert not any("this machine has" in line for line in warnings)


def test_a_host_tier_larger_than_the_machine_is_refused() -> None:
    pool = {"args": {"tensor_parallel_size": 2}}
    (line,) = problems_of(tiers={"host": {"max_bytes": 13 << 30}}, decode=pool)
    assert line.startswith(f"tiers.host.max_bytes: {13 << 30} — of each of 2 ranks, and this")
    checks.check(deployment_with(tiers={"host": {"max_bytes": 11 << 30}}, decode=pool))


def test_engines_that_are_too_large_together_are_a_warning() -> None:
    made = deployment_with(engine=space(10), prefill={"replicas": 2})
    assert any("take 30.0 GiB together" in line for line in checks.check(made))
    made = deployment_with(decode={"replicas": 8})
    assert any("ask for 9 CPUs, and this machine has 8" in line for line in checks.check(made))
    assert not any("this machine has" in line for line in checks.check(deployment_with()))


def test_a_million_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="less than or equal to 10000"):
        deployment_with(decode={"replicas": 1_000_000})
    with pytest.raises(ValueError, match="less than or equal to 10000"):
        deployment_with(decode={"autoscale": {"max_replicas": 1_000_000}})


def test_the_cache_must_hold_one_request(tmp_path: Path) -> None:
    # 2 (K and V) x 2 bytes x 64 numbers x 2 heads x 64 layers: 32 KiB for each token.
    model = make_checkpoint(tmp_path / "model", num_hidden_layers=64, torch_dtype="bfloat16")
    # vLLM takes one block of 128 tokens for itself.
    fits = {**space(1), "args": {"max_model_len": 32640}}
    checks.check(deployment_with(model=model, engine=fits))
    (line,) = problems_of(model=model, engine={**space(1), "args": {"max_model_len": 32641}})
    assert "set 32640 or less, or raise it" in line
    longer = make_checkpoint(
        tmp_path / "longer", num_hidden_layers=64, max_position_embeddings=65536
    )
    lines = problems_of(model=longer, prefill=space(1), engine={"args": {"max_model_len": 65536}})
    assert lines == [
        "engine.args.max_model_len: 65536 — one request of this length takes 2.0 GiB of KV cache "
        f"on each rank, and {setting} is less; set 32640 or less, or raise it"
        for setting in (
            "prefill.env.VLLM_CPU_KVCACHE_SPACE: '1' (GiB)",
            "VLLM_CPU_KVCACHE_SPACE: not set (1 GiB)",
        )
    ]
    lines = problems_of(model=longer)  # vLLM takes the model's own length
    assert lines[0].startswith("prefill.args.max_model_len: 65536 — one request of this length")


@pytest.mark.parametrize(
    ("args", "config"),
    [
        ({"max_model_len": "auto"}, {}),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}),
        ({"tensor_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2}, {}),
        ({"num_gpu_blocks_override": 100}, {}),
        ({"kv_cache_memory_bytes": "3G"}, {}),
        ({}, {"sliding_window": 4096}),
        ({}, {"layer_types": ["full_attention", "sliding_attention"]}),
        ({}, {"model_type": "another"}),
        ({}, {"num_hidden_layers": ...}),
    ],
)
def test_a_cache_that_may_be_enough_passes(
    tmp_path: Path, args: dict[str, Any], config: dict[str, Any]
) -> None:
    keys = {"num_hidden_layers": 64, "max_position_embeddings": 65408} | config
    model = make_checkpoint(tmp_path / "model", **keys)
    checks.check(deployment_with(model=model, engine={"args": args}))


def test_the_machines_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 << 28 < memory_checks.machine_bytes() < 1 << 46
