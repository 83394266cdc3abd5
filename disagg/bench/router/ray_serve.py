"""Ray Serve LLM for `disagg bench router`, with an engine that computes nothing.

`python -m disagg.bench.router.ray_serve PORT DIR` serves its app of prefill and decode with direct
streaming: HAProxy asks Ray's router for a decode replica and passes the request on to it; the
replica asks a prefill replica through a Serve handle, then answers. Its engine is a class of Ray's
replicas, so it is replaced there, with Ray's own variable for it. Only its Python imports this.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

from disagg.bench.router import fake_engine
from disagg.bench.router.load import MODEL

_ENV = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAYLLM_VLLM_ENGINE_CLS": f"{__package__}.ray_serve.FakeEngine",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Without it, a proxy that is not ready after 5 s is killed, and the app does not start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
# More than there are: Ray counts them, and nothing computes.
_CPUS = 16
_EVENTS = [event.decode() for event in fake_engine.stream(ids=False, usage=False)]


class FakeEngine:
    """Ray's `LLMEngine` (ray/llm/_internal/serve/core/engine/protocol.py), as far as it is used."""

    def __init__(self, llm_config: Any) -> None:
        llm_config.setup_engine_backend()
        self._is_prefill = (
            llm_config.engine_kwargs["kv_transfer_config"]["kv_role"] == "kv_producer"
        )

    async def start(self) -> None:
        """Nothing."""

    async def check_health(self) -> None:
        """Always healthy."""

    async def shutdown(self) -> None:
        """Nothing."""

    def routing_stats(self) -> dict[str, Any]:
        """None."""
        return {}

    async def build_asgi_app(self) -> Any:
        """What Ray adds its routes to."""
        from fastapi import FastAPI

        app = FastAPI()

        async def health() -> dict[str, str]:
            return {}

        app.add_api_route("/health", health)
        return app

    async def completions(self, request: Any, _: Any = None) -> AsyncGenerator[Any, None]:
        """The answers of `fake_engine.py`; a leg that was left out is refused."""
        from ray.llm._internal.serve.core.configs.openai_api_models import CompletionResponse

        params = request.kv_transfer_params or {}
        if self._is_prefill:
            if not params.get("do_remote_decode"):
                raise ValueError("no do_remote_decode: not a prefill leg")
            yield CompletionResponse(**fake_engine.prefilled())
        elif not params.get("do_remote_prefill"):
            raise ValueError("no kv_transfer_params: the prefill leg was left out")
        elif request.stream:
            for event in _EVENTS:
                yield event
                await asyncio.sleep(0)  # each by itself, as `fake_engine.py` sends them
        else:
            yield CompletionResponse(**fake_engine.whole())


def _pool(role: str) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": MODEL, "model_source": MODEL},
        "engine_kwargs": {
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": role}
        },
        "deployment_config": {"autoscaling_config": None, "num_replicas": 1},
        "placement_group_config": {"bundles": [{"CPU": 1}]},
    }


def main(port: int, folder: str) -> None:
    """Serve until SIGTERM. `folder`: for Ray's files; its sockets allow a short path only."""
    os.environ.update(_ENV)  # before Ray's modules read them, and its workers inherit them
    import ray
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    ray.init(num_cpus=_CPUS, include_dashboard=False, _temp_dir=folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # Ray sets its own
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        app = build_pd_openai_app(
            {"prefill_config": _pool("kv_producer"), "decode_config": _pool("kv_consumer")}
        )
        serve.run(app)
        signal.pause()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
