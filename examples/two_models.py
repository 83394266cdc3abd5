"""Two models, two deployments, one address: a request goes to the router that has its model.

    make serve                                                       # tiny, on port 8000
    .venv/bin/disagg make-model .cache/models/wide --hidden 512
    .venv/bin/disagg serve examples/two_models.yaml                  # wide, on port 8001
    .venv/bin/python examples/two_models.py http://127.0.0.1:8000 http://127.0.0.1:8001

Clients then ask http://127.0.0.1:8080/v1 for `tiny` or `wide`; /v1/models lists both. Each
deployment keeps its own engines, queues, keys and metrics, and starts and stops alone. On a Ray
cluster submit each YAML as a job of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import aiohttp
from aiohttp import web

# Headers of one connection, not of the message. The body is passed on as it comes.
HOP_BY_HOP = {"connection", "keep-alive", "host", "content-length", "transfer-encoding", "upgrade"}


class Gateway:
    """Knows which router has which model. Asks again for a model that it does not know."""

    def __init__(self, routers: list[str]) -> None:
        self._routers = [router.rstrip("/") for router in routers]
        self._of_model: dict[str, str] = {}

    async def client(self, app: web.Application) -> Any:
        """One client for the app's life."""
        async with aiohttp.ClientSession(auto_decompress=False) as self._client:
            yield

    async def models(self, request: web.Request) -> web.Response:
        """All models of all routers that answer, in OpenAI's shape."""
        return web.json_response({"object": "list", "data": await self._ask_all(request)})

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Pass the request on as it is, and the answer as it comes."""
        body = await request.read()
        try:
            model = str(json.loads(body)["model"])
        except (ValueError, KeyError, TypeError):
            return error(400, "the body must be a JSON object with a model")
        if model not in self._of_model:
            await self._ask_all(request)
        if model not in self._of_model:
            return error(404, f"no model {model!r}; there are: {', '.join(self._of_model)}")
        url = f"{self._of_model[model]}{request.raw_path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        try:
            async with self._client.request(
                request.method, url, data=body, headers=passed(request.headers), timeout=timeout
            ) as answer:
                out = web.StreamResponse(status=answer.status, headers=passed(answer.headers))
                await out.prepare(request)
                async for chunk in answer.content.iter_any():
                    await out.write(chunk)
                await out.write_eof()
                return out
        except aiohttp.ClientConnectorError:
            return error(503, f"the deployment of {model!r} does not answer")

    async def _ask_all(self, request: web.Request) -> list[dict[str, Any]]:
        answers = await asyncio.gather(*(self._ask(r, request) for r in self._routers))
        for router, models in zip(self._routers, answers, strict=True):
            self._of_model.update(dict.fromkeys((model["id"] for model in models), router))
        return [model for models in answers for model in models]

    async def _ask(self, router: str, request: web.Request) -> list[dict[str, Any]]:
        try:
            async with self._client.get(
                f"{router}/v1/models",
                headers=passed(request.headers),  # with the client's key
                timeout=aiohttp.ClientTimeout(total=5),
            ) as answer:
                models: list[dict[str, Any]] = (await answer.json())["data"]
                return models
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            return []


def passed(headers: Any) -> dict[str, str]:
    """What goes on to the next one."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def error(status: int, message: str) -> web.Response:
    """In OpenAI's shape."""
    kind = "NotFoundError" if status == 404 else "BadRequestError" if status == 400 else "Error"
    told = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": told}, status=status)


def app(routers: list[str]) -> web.Application:
    """The gateway before these routers."""
    gateway = Gateway(routers)
    made = web.Application(client_max_size=32 << 20)
    made.cleanup_ctx.append(gateway.client)
    made.router.add_get("/v1/models", gateway.models)
    made.router.add_post("/v1/{rest:.*}", gateway.forward)
    return made


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("router", nargs="+", help="URL of a router, without /v1")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    # A client that leaves ends its request, and with it the one to the router.
    web.run_app(
        app(options.router), host=options.host, port=options.port, handler_cancellation=True
    )


if __name__ == "__main__":
    main()
