"""Blocks that left the engine's own cache come back from host memory and files, in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg.bench.vllm_server import VllmServer, token_ids
from engine.conftest import Fleet, running, transfer
from engine.waiting import eventually

ENGINES = ("producer", "single")
Prompt = Callable[[int], list[int]]
BLOCK = 4 * 2 * 128 * 2 * 64 * 4  # layers, KV heads, tokens, K and V, head dim, float32
# So small that a few prompts push each other out of the engine's own cache.
SMALL = ("--num-gpu-blocks-override", "48", "--max-model-len", "4096")


def tiers(**extra: object) -> dict[str, object]:
    return {
        "kv_connector": "DisaggOffloadConnector",
        "kv_connector_module_path": "disagg.connector.offload",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def beside_the_handover(**extra: object) -> dict[str, object]:
    connectors = [transfer("kv_consumer"), tiers(**extra)]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def engines(
    fleet: Fleet, model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """`large`: host memory alone. `both`: a host tier of few slots, files, and the hand-over."""
    logs, temporary = tmp_path_factory.mktemp("logs"), fleet.storage.parent
    env = {"TMPDIR": str(temporary), "TORCHDYNAMO_DISABLE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    large = VllmServer(
        "large", model, logs / "large.log", tiers(host_bytes=1 << 28), SMALL, env=env
    )
    config = beside_the_handover(host_bytes=24 * BLOCK, directory=str(folder))
    both = VllmServer("both", model, logs / "both.log", config, SMALL, env=env)
    fleet.wake()
    with running([large, both]):
        yield large, both


@pytest.fixture
def large(engines: tuple[VllmServer, VllmServer]) -> VllmServer:
    return engines[0]


def moved(engine: VllmServer, medium: str) -> float:
    return engine.metric("vllm:kv_offload_total_bytes_total", transfer_type=medium)


def test_host(fleet: Fleet, large: VllmServer, prompt: Prompt) -> None:
    ids = prompt(3000)
    first = large.complete(ids)
    assert eventually(lambda: moved(large, "GPU_to_CPU") >= 23 * BLOCK)
    large.post("/reset_prefix_cache", {}).raise_for_status()
    before = moved(large, "CPU_to_GPU")
    again = large.complete(ids)
    print(large.metrics("vllm:kv_offload"), large.metrics("disagg_tier"))
    assert moved(large, "CPU_to_GPU") - before == 23 * BLOCK
    assert token_ids(first) == token_ids(again) == token_ids(fleet.single.complete(ids))
