"""An engine whose ranks are on several Ray nodes, by vLLM's own Ray executor.

That executor supports only accelerators. So each node claims to have a GPU, and vLLM gets a
platform plugin: its CPU platform, with Ray's resource name of a GPU.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.state import list_actors

from disagg.cluster import placing, pools
from disagg.cluster.engines import why_ended
from disagg.config import Deployment
from disagg.engine.spec import EngineInfo, EngineSpec
from disagg.testing.checkpoint import make_model
from disagg.testing.http import client
from disagg.testing.ray_nodes import RayNodes
from disagg.testing.vllm_server import CPU_ENV
from disagg.testing.waiting import eventually

pytestmark = pytest.mark.timeout(420)

NAMESPACE, KEY = "ranks", "the-engines-key"
PLATFORM = """
from vllm.platforms.cpu import CpuPlatform


class CpusAsGpus(CpuPlatform):
    ray_device_key = "GPU"


def register():
    return "cpus_as_gpus.CpusAsGpus"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """Two nodes that claim to have a GPU."""
    folder = tmp_path_factory.mktemp("platform")
    (folder / "cpus_as_gpus.py").write_text(PLATFORM)
    about = folder / "cpus_as_gpus-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpus-as-gpus\nVersion: 1\n")
    point = "[vllm.platform_plugins]\ncpus_as_gpus = cpus_as_gpus:register\n"
    (about / "entry_points.txt").write_text(point)
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with RayNodes(2, 2, gpus=1, dashboard=True) as cluster:
            ray.init(namespace=NAMESPACE, log_to_driver=False)
            try:
                yield cluster
            finally:
                ray.shutdown()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """Prefill is a usual CPU engine. Each of decode's two stages is on a node of its own."""
    model = tmp_path_factory.mktemp("model") / "tiny"
    make_model(model)
    stages: dict[str, Any] = {
        "distributed_executor_backend": "ray",
        "pipeline_parallel_size": 2,
        "compilation_config": {"mode": 2, "backend": "eager"},
    }
    args = {"dtype": "float32", "block_size": 128, "max_model_len": 4096}
    return Deployment.model_validate(
        {
            "model": {"path": str(model), "served_name": "tiny"},
            "engine": {"args": args, "env": CPU_ENV},
            "prefill": {"args": {"enforce_eager": True}},
            "decode": {"resources": {"num_cpus": 1, "num_gpus": 2}, "args": stages},
            "transfer": {"host": "127.0.0.1"},
        }
    )


def spec(deployment: Deployment, role: Any, folder: Path) -> EngineSpec:
    return EngineSpec(deployment, role, 0, "run", str(folder), False, "0123456789abcdef", KEY)


def ask(info: EngineInfo, ids: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": ids, "max_tokens": 8, "temperature": 0, **more}
    answer = client().post(
        f"{info.url}/v1/completions",
        json=body | {"return_token_ids": True},
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=60,
    )
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def ranks() -> list[Any]:
    """The living placement groups of all engines, from Ray's list."""
    found = list_actors(filters=[("class_name", "=", "RayWorkerProc")])
    return [one for one in found if one.state == "ALIVE"]


def check_handed_over(prefill: EngineInfo, decode: EngineInfo) -> None:
    for length in (5, 128, 700):
        ids = [(7 * i + length) % 200 + 1 for i in range(length)]
        remote = {"do_remote_decode": True, "do_remote_prefill": False}
        first = ask(prefill, ids, max_tokens=1, kv_transfer_params=remote)
        answer = ask(decode, ids, kv_transfer_params=first["kv_transfer_params"])
        alone = ask(prefill, ids)
        assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    text = client().get(f"{decode.url}/metrics", timeout=10).text
    (line,) = [line for line in text.splitlines() if line.startswith("disagg_handoffs_total{")]
    assert 'outcome="loaded"' in line
    assert line.endswith(" 3.0")


@pytest.fixture(scope="module")
def prefill(
    cluster: RayNodes, deployment: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineInfo]:
    engines = pools.launch([spec(deployment, "prefill", tmp_path_factory.mktemp("kv"))])
    yield pools.wait_ready(engines, lambda said: None)[0]
    pools.stop(engines, 1.0, 20.0)


@pytest.mark.slow
def test_ranks_on_two_nodes_end_with_their_engine(
    prefill: EngineInfo, deployment: Deployment, tmp_path: Path
) -> None:
    asked = placing.ResourceRequest.of(deployment, "decode")
    engines = pools.launch([spec(deployment, "decode", tmp_path)])
    try:
        (decode,) = pools.wait_ready(engines, lambda said: None)
        assert len({one.node_id for one in ranks()}) == 2
        check_handed_over(prefill, decode)
        assert not placing.has_room(asked, placing.nodes())
        os.kill(decode.pid, signal.SIGKILL)
        assert eventually(lambda: not ranks(), 30)
    finally:
        pools.stop(engines, 1.0, 20.0)
    assert eventually(lambda: placing.has_room(asked, placing.nodes()), 20)


@pytest.mark.slow
def test_an_engine_ends_with_a_node_of_its_ranks(
    cluster: RayNodes, deployment: Deployment, tmp_path: Path
) -> None:
    """Its end is reported, and it can start again when there is another node."""
    answers = []
    for node in ("dies", "came"):
        (engine,) = pools.launch([spec(deployment, "decode", tmp_path)])
        try:
            (decode,) = pools.wait_ready([engine], lambda said: None)
            answers.append(ask(decode, list(range(1, 400)))["choices"][0]["token_ids"])
            if node == "came":
                break
            (elsewhere,) = [one.pid for one in ranks() if one.node_id != decode.node_id]
            cluster.kill_node_of(elsewhere)
            began = time.monotonic()
            assert ray.wait([engine.ended], timeout=30)[0]
            print(f"ended after {time.monotonic() - began:.1f} s: {why_ended(engine).cause}")
        finally:
            pools.stop([engine], 1.0, 20.0)
        cluster.add()
    assert answers[0] == answers[1]
