"""Ray Serve LLM's own app of prefill and decode, with our connector moving the KV cache.

    pip install "ray[llm]==2.60.0" disagg        # it brings vLLM 0.29.0
    python examples/ray_serve_llm.py Qwen/Qwen3-8B --prefill 1 --decode 1
    python examples/ray_serve_llm.py .cache/models/tiny --cpu

Ray Serve starts, pairs and scales the engines, and its ingress speaks the OpenAI API on port 8000.
Only the connector is disagg's. Serve's orchestrator speaks NIXL's pull contract to connectors that
it does not know, and so to ours.

On several nodes, name the interface that engines reach each other by (--interface eth0), and
export DISAGG_SECRET before `ray start` on each node; on one node its engines share a file.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

# For vLLM's CPU engines.
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "DISAGG_POLL_SLEEP_US": "50",
}


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a hub's name, or a folder that every node can read")
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines")
    parser.add_argument("--decode", type=int, default=1, help="decode engines")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--interface", default="127.0.0.1", help="where the connector listens")
    parser.add_argument("--cpu", action="store_true", help="engines on CPU, in float32")
    options = parser.parse_args()
    if options.cpu:
        os.environ.update(CPU)  # before Ray starts, whose workers inherit it

    import ray
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    if options.cpu:
        ray.init(num_cpus=16, include_dashboard=False)  # more than there are: shares, not cores
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    app = build_pd_openai_app(
        {
            "prefill_config": pool("kv_producer", options.prefill, options),
            "decode_config": pool("kv_consumer", options.decode, options),
            "ingress_deployment_config": {"autoscaling_config": None, "num_replicas": 1},
        }
    )
    serve.run(app, blocking=True)


def pool(role: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """An LLMConfig: the engines of one role."""
    engine: dict[str, Any] = {
        "max_model_len": 16384,
        "kv_transfer_config": {
            "kv_connector": "DisaggConnector",
            "kv_connector_module_path": "disagg.connector",
            "kv_role": role,
            "kv_connector_extra_config": {"host": options.interface},
        },
    }
    if options.cpu:
        engine |= {"dtype": "float32", "block_size": 128, "enforce_eager": True}
    return {
        "model_loading_config": {
            "model_id": os.path.basename(options.model.rstrip("/")).lower(),
            "model_source": options.model,
        },
        "engine_kwargs": engine,
        "deployment_config": {"autoscaling_config": None, "num_replicas": replicas},
        "placement_group_config": {"bundles": [{"CPU": 1} if options.cpu else {"GPU": 1}]},
    }


if __name__ == "__main__":
    main()
