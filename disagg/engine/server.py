"""Runs one vLLM engine and vLLM's OpenAI server on a socket that the caller bound.

`run_engine` imports vLLM, which takes most of a minute: call it in a thread that may block. It must
never install signal handlers, nor use a fixed port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from disagg.engine.liveness import Liveness, LivenessHealth
from disagg.vllm_compat import server as vllm_server
from disagg.vllm_compat.kv_events import KvEventAddresses, kv_event_addresses

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI
    from prometheus_client.core import Metric
    from vllm.engine.protocol import EngineClient

WATCH_S = 1.0


class EngineDied(Exception):
    """vLLM's engine process ended on its own while serving."""


def bind(host: str, port: int = 0) -> socket.socket:
    """A TCP socket bound to one address; port 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Of a socket without its protocol, asyncio does not turn off Nagle's delay.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket) -> str:
    """The http URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def to_argv(args: Mapping[str, Any]) -> list[str]:
    """Engine arguments as a command line for vLLM, which checks and converts them."""
    argv: list[str] = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list) and not any(isinstance(item, dict) for item in value):
            argv += [flag, *map(str, value)]
        elif isinstance(value, dict | list):
            argv.append(f"{flag}={json.dumps(value)}")
        else:
            argv.append(f"{flag}={value}")
    return argv


def parse_args(args: Mapping[str, Any]) -> Namespace:
    """The arguments as vLLM's parser returns them. Raises ValueError with vLLM's message."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parsed = vllm_server.make_arg_parser(Parser()).parse_args(to_argv(args))  # type: ignore[no-untyped-call]
    vllm_server.configure_logging(parsed)
    vllm_server.validate_serve_args(parsed)
    if parsed.tool_parser_plugin:
        ToolParserManager.import_tool_parser(parsed.tool_parser_plugin)
    if parsed.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(parsed.reasoning_parser_plugin)
    vllm_server.validate_server_args(parsed)
    return parsed


async def run_engine(
    args: Mapping[str, Any],
    sock: socket.socket,
    ready: Callable[[dict[str, str | int], KvEventAddresses | None], None],
    stop: asyncio.Event,
    grace_s: Callable[[], float],
    hang_timeout_s: float,
) -> None:
    """Start the engine, call `ready` with the resolved model and where the engine
    publishes KV events, serve until `stop` is set.

    Raises what vLLM raises at start. Raises EngineDied when the engine ends on its own, or makes no
    progress for `hang_timeout_s`. `grace_s` is called at the stop: the seconds that requests in
    flight may still run.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import (
        build_async_engine_client_from_engine_args,
    )

    parsed = parse_args(args)
    vllm_args = AsyncEngineArgs.from_cli_args(parsed)
    vllm_server.propagate_late_interaction(parsed, vllm_args)
    async with build_async_engine_client_from_engine_args(vllm_args) as engine:
        liveness = Liveness(engine.is_sleeping)
        server = await _build_server(engine, parsed, liveness)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await _until_started(server, serving)
        ready(_model_info(engine, parsed), kv_event_addresses(engine))
        try:
            await _watch(engine, serving, stop, liveness, hang_timeout_s)
        finally:
            server.config.timeout_graceful_shutdown = max(1, round(grace_s()))
            server.should_exit = True
            await serving


def metrics() -> Iterable[Metric]:
    """The metrics that `/metrics` of this process's engine shows."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    families: Iterable[Metric] = get_prometheus_registry().collect()
    return families


async def _build_server(
    engine: EngineClient, parsed: Namespace, liveness: Liveness
) -> uvicorn.Server:
    import uvicorn
    from vllm import envs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import NoSignalServer
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    from disagg.engine.refusals import Refusals
    from disagg.engine.request_log import RequestLog
    from disagg.engine.routes import with_routes

    tasks = await engine.get_supported_tasks()
    app: FastAPI = build_app(parsed, tasks, engine.model_config)
    await init_app_state(engine, app.state, parsed, tasks)
    config = uvicorn.Config(
        LivenessHealth(RequestLog(Refusals(with_routes(app))), liveness),
        log_config=get_uvicorn_log_config(parsed) or uvicorn.config.LOGGING_CONFIG,
        log_level=parsed.uvicorn_log_level,
        access_log=not parsed.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        h11_max_incomplete_event_size=parsed.h11_max_incomplete_event_size,
    )
    server: uvicorn.Server = NoSignalServer(config)
    app.state.server = server  # vLLM's error handlers stop the server when the engine is dead
    return server


async def _until_started(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            await serving
            raise EngineDied("the HTTP server ended while starting")
        await asyncio.sleep(0.01)


async def _watch(
    engine: EngineClient,
    serving: asyncio.Task[None],
    stop: asyncio.Event,
    liveness: Liveness,
    hang_timeout_s: float,
) -> None:
    stopping = asyncio.create_task(stop.wait())
    asking = asyncio.create_task(liveness.run())  # if it raises, `engine.errored` is set too
    try:
        while not stopping.done():
            await asyncio.wait({stopping, serving}, timeout=WATCH_S, return_when="FIRST_COMPLETED")
            if engine.errored or serving.done():
                raise EngineDied("vLLM's engine process died: killed, or out of memory")
            if liveness.silent_s > hang_timeout_s:
                limit = f"{hang_timeout_s:g} s (engine.hang_timeout_s)"
                raise EngineDied(f"vLLM's engine process made no progress for {limit}")
    finally:
        stopping.cancel()
        asking.cancel()
        await asyncio.wait({asking})
        with contextlib.suppress(asyncio.CancelledError, Exception):
            asking.result()


def _model_info(engine: EngineClient, parsed: Namespace) -> dict[str, str | int]:
    model = engine.vllm_config.model_config
    cache = engine.vllm_config.cache_config
    served = parsed.served_model_name
    return {
        "name": served[0] if served else parsed.model,
        "root": parsed.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks or 0,
    }
