"""Ray Serve LLM's prefix router in front of running engines: a peer of `disagg bench serve`.

An application of Ray Serve with one replica for each engine, which passes requests on. The replica
is chosen by `ray.serve.llm.request_router.PrefixCacheAffinityRouter` with its own defaults. It
compares characters and takes no token ids, so each id is shown to it as one character.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import util
from typing import Any

INSTALL = "pip install 'ray[serve]==2.60.0' pyarrow"
# No characters: the ids from here on are moved past them.
_SURROGATES, _SURROGATES_END = 0xD800, 0xE000
_AT_ONCE = 1000


@dataclass(frozen=True)
class Asked:
    """One request. `prompt`: what Ray's router compares; it looks for this name."""

    prompt: str
    body: bytes


def is_installed() -> bool:
    """Whether Ray Serve has what its prefix router imports."""
    return all(util.find_spec(name) is not None for name in ("grpc_reflection", "pyarrow"))


def text(ids: list[int]) -> str:
    """One character for each token id, equal for equal ids."""
    moved = _SURROGATES_END - _SURROGATES
    return "".join(chr(one if one < _SURROGATES else one + moved) for one in ids)


def application(urls: list[str]) -> Any:
    """The application: an ingress, and a replica for each of these engines."""
    import aiohttp
    import msgspec
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from starlette.responses import Response, StreamingResponse

    router: Any = "ray.serve.llm.request_router:PrefixCacheAffinityRouter"

    @serve.deployment(
        num_replicas=len(urls),
        max_ongoing_requests=_AT_ONCE,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class=router),
    )
    class Engine:
        def __init__(self) -> None:
            self._url = urls[serve.get_replica_context().rank.rank]
            self._session: aiohttp.ClientSession | None = None

        async def complete(self, asked: Asked) -> AsyncIterator[bytes]:
            if self._session is None:
                self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))
            headers = {"content-type": "application/json"}
            url = f"{self._url}/v1/completions"
            async with self._session.post(url, data=asked.body, headers=headers) as answer:
                answer.raise_for_status()
                async for data in answer.content.iter_any():
                    yield data

    @serve.deployment(max_ongoing_requests=_AT_ONCE, ray_actor_options={"num_cpus": 0})
    class Ingress:
        def __init__(self, engines: Any) -> None:
            self._engines = engines.options(stream=True)

        async def __call__(self, request: Any) -> Response:
            if request.method == "GET":
                return Response()
            body = await request.body()
            asked = Asked(text(msgspec.json.decode(body)["prompt"]), body)
            answer = self._engines.complete.remote(asked)
            return StreamingResponse(answer, media_type="text/event-stream")

    return Ingress.bind(Engine.bind())  # type: ignore[attr-defined]


def main() -> None:
    """Serve until SIGTERM."""
    import ray
    from ray import serve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engines", nargs="+", required=True, metavar="URL")
    args = parser.parse_args()
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    try:
        serve.run(application(args.engines), route_prefix="/")
        signal.pause()  # Ray's own handler of SIGTERM ends this process
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
