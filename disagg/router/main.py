"""`disagg router`: only the router, in the foreground, in front of engines started elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator, Sequence

import uvloop

from disagg import credentials
from disagg.config import ConnectorName, PairingSection, RouterSection
from disagg.credentials import ApiKey
from disagg.errors import ConfigError, DisaggError
from disagg.router.discovery.calls import RegistryCalls
from disagg.router.discovery.registry import Registry
from disagg.router.discovery.sources import open_registry
from disagg.router.processes.parent import claim, open_server
from disagg.router.server.admin_socket import open_admin_socket
from disagg.router.server.app import create_app
from disagg.router.server.models import endpoints
from disagg.router.server.server import RouterPlan, RouterServer, bind, settle, url_of
from disagg.router.topology import EngineEndpoint

__all__ = ["RouterServer", "bind", "create_app", "run"]


def run(
    section: RouterSection,
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    engine_key_env: str | None = None,
    connector: ConnectorName = "disagg",
) -> int:
    """Serve until a signal or `disagg drain`, then finish the requests in flight; status 0.

    `prefill`, `decode`: the engines' URLs; the section's if a list is empty. More engines come and
    go as `section.engines` and operators say. A second signal exits
    at once. SIGHUP drains too: it comes from a lost terminal, perhaps twice, so a second one does
    not exit. Raises ConfigError or DisaggError.
    """
    keys = credentials.router_keys(section, "")
    registry = None if section.models else _registry(section, prefill, decode, keys)
    plan = RouterPlan(
        section,
        _of_models(section, prefill, decode) if registry is None else registry.engines,
        down={} if registry is None else registry.down,
        api_keys=keys,
        engine_key=credentials.engine_key(engine_key_env) if engine_key_env else None,
        connector=connector,
    )
    credentials.tls(section, "")
    credentials.engine_tls(section, "")
    for name, settings, used in _connectors(section, connector):
        if settings.first_token == "prefill" and used != "disagg":
            raise ConfigError(
                f"{name}first_token: 'prefill' — engines with the connector {used} cannot "
                "continue after prefill's token; set decode, or use engines with --connector disagg"
            )
    try:
        sock = claim(section.host, section.port, section.processes)
    except OSError as error:
        raise ConfigError(
            f"--port: {section.host}:{section.port} is not available ({error.strerror}); "
            "choose another one"
        ) from error
    port = sock.getsockname()[1]
    admin = open_admin_socket(section.admin_socket, port) if section.admin_socket else None
    try:
        uvloop.run(_serve(plan, registry, sock, admin.socket if admin else None))
    finally:
        if admin:
            admin.remove()
    return 0


async def _serve(
    plan: RouterPlan, registry: Registry | None, sock: socket.socket, admin: socket.socket | None
) -> None:
    stop_requested = asyncio.Event()

    def on_signal(signum: int) -> None:
        if stop_requested.is_set() and signum != signal.SIGHUP:
            os._exit(128 + signum)
        stop_requested.set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signum, on_signal, signum)
    url = url_of(plan.section, sock.getsockname()[1])
    server = open_server(plan, sock, admin)
    try:
        if registry is not None:
            server.manage(RegistryCalls(registry))
        await server.start()
        if registry is not None:
            registry.start(server)
        settle()
        print(f"Ready: {url}/v1", flush=True)
        ended = asyncio.create_task(server.ended())
        events = (stop_requested, server.drain_requested)
        reasons = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait([ended, *reasons], return_when="FIRST_COMPLETED")
        if ended.done():
            await ended
    except RuntimeError as error:
        raise DisaggError(str(error)) from error
    finally:
        if registry is not None:
            await registry.close()
        await server.stop(plan.section.limits.drain_s)


def _registry(
    section: RouterSection, prefill: Sequence[str], decode: Sequence[str], keys: Sequence[ApiKey]
) -> Registry:
    """The engines of a router with one model. Raises ConfigError."""
    registry = open_registry(
        section.engines,
        prefill,
        decode,
        drain_s=section.limits.drain_s,
        operators_add=section.admin_socket is not None or any(key.is_admin for key in keys),
    )
    if "decode" not in {*registry.down, *(engine.role for engine in registry.engines)}:
        raise ConfigError(
            "engines.decode: empty — name the URL of a decode engine, or --decode URL, or where "
            "engines are found (engines.file, engines.kubernetes)"
        )
    return registry


def _of_models(
    section: RouterSection, prefill: Sequence[str], decode: Sequence[str]
) -> list[EngineEndpoint]:
    """The engines of several models, which stay. Raises ConfigError."""
    if prefill or decode or not section.engines.is_empty:
        raise ConfigError(
            "models: names the engines of each model, so engines, --prefill and --decode must "
            "not; remove them, or models"
        )
    return endpoints(section.models)


def _connectors(
    section: RouterSection, connector: ConnectorName
) -> Iterator[tuple[str, PairingSection, ConnectorName]]:
    """The connector for each model, and the pairing with its place in the file."""
    if not section.models:
        yield "pairing.", section.pairing, connector
    for number, model in enumerate(section.models):
        pairing = section.of_model(model).pairing
        yield f"models.{number}.pairing.", pairing, model.connector or connector
