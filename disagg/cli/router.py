"""Commands that run a router, and that ask and tell a running one."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from disagg import options
from disagg.cli.shared import (
    KeyEnv,
    LongestWait,
    Socket,
    TrustedCa,
    Where,
    only_given,
    operator,
)
from disagg.errors import ConfigError

PANEL = "Routers"

app = typer.Typer()


class Connector(StrEnum):
    """The values of `--connector`."""

    disagg = "disagg"
    nixl = "nixl"
    example = "example"


@app.command(rich_help_panel=PANEL)
def router(
    decode: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a decode engine; repeat for more. Default: engines.decode of the file."
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a prefill engine; repeat for more. Without one, decode engines compute "
            "all prompts."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="YAML with the keys of a deployment's router section."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes any free port.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of router processes that share the port.")
    ] = None,
    api_keys_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the clients' API keys."),
    ] = None,
    admin_keys_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the operators' keys."),
    ] = None,
    admin_socket: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Unix socket on which every request is an operator's, in a folder of mode 0700.",
        ),
    ] = None,
    engine_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the engines' key."),
    ] = None,
    prefill_policy: Annotated[
        str | None, typer.Option(help="Policy that chooses the prefill engine.")
    ] = None,
    decode_policy: Annotated[
        str | None, typer.Option(help="Policy that chooses the decode engine.")
    ] = None,
    local_prefill_tokens: Annotated[
        int | None, typer.Option(help=options.LOCAL_PREFILL_TOKENS_HELP)
    ] = None,
    prefill_wait_share: Annotated[
        float | None, typer.Option(help=options.PREFILL_WAIT_SHARE_HELP)
    ] = None,
    first_token: Annotated[str | None, typer.Option(help=options.FIRST_TOKEN_HELP)] = None,
    first_token_hold_s: Annotated[
        float | None, typer.Option(help=options.FIRST_TOKEN_HOLD_S_HELP)
    ] = None,
    follow: Annotated[
        bool | None,
        typer.Option(
            "--follow/--no-follow",
            help="Send decode's leg while prefill still computes the prompt. [default: if both "
            "engines are on different hosts]",
        ),
    ] = None,
    root_path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Prefix under which a proxy publishes the router."),
    ] = None,
    allowed_origins: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Web pages that may use the API: '[\"*\"]' for any."),
    ] = None,
    allowed_methods: Annotated[
        str | None, typer.Option(metavar="JSON", help="HTTP methods that they may use.")
    ] = None,
    allowed_headers: Annotated[
        str | None, typer.Option(metavar="JSON", help="Request headers that they may send.")
    ] = None,
    allow_credentials: Annotated[
        bool | None, typer.Option("--allow-credentials", help="They may send cookies.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate, to serve https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    connector: Annotated[
        Connector, typer.Option(help="The KV connector that the engines use.")
    ] = Connector.disagg,
) -> None:
    """Run the router alone, in front of engines that are already running.

    Options override the file.
    """
    from disagg import config

    pairing = {
        "prefill": prefill_policy,
        "decode": decode_policy,
        "local_prefill_tokens": local_prefill_tokens,
        "prefill_wait_share": prefill_wait_share,
        "first_token": first_token,
        "first_token_hold_s": first_token_hold_s,
        "follow": follow,
    }
    cors = {
        "allowed_origins": options.json_list("--allowed-origins", allowed_origins),
        "allowed_methods": options.json_list("--allowed-methods", allowed_methods),
        "allowed_headers": options.json_list("--allowed-headers", allowed_headers),
        "allow_credentials": allow_credentials,
    }
    given = {
        "host": host,
        "port": port,
        "processes": processes,
        "api_keys_env": api_keys_env,
        "admin_keys_env": admin_keys_env,
        "admin_socket": admin_socket,
        "tls_cert_file": tls_cert,
        "tls_key_file": tls_key,
        "root_path": root_path,
        "pairing": only_given(pairing),
        "cors": only_given(cors),
    }
    section = config.load_router(file, only_given(given))
    run = import_module("disagg.router.main").run
    raise typer.Exit(
        run(
            section,
            prefill or [],
            decode or [],
            engine_key_env=engine_key_env,
            connector=connector.value,
        )
    )


@app.command(rich_help_panel=PANEL)
def drain(
    where: Where = None,
    socket: Socket = None,
    key_env: KeyEnv = None,
    ca: TrustedCa = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when all running requests have ended.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Accept requests again.")] = False,
    timeout: LongestWait = 600.0,
) -> None:
    """Make a router refuse new requests and end when the running requests have ended.

    The router of `disagg serve` does not end. --undo makes it accept requests again.
    """
    run = import_module("disagg.router.drain_client").run
    client = operator(where, socket, key_env, ca)
    raise typer.Exit(run(client, wait=wait, undo=undo, timeout_s=timeout))


engines = typer.Typer(
    help="List, add and remove the engines of a running `disagg router`.", no_args_is_help=True
)


@engines.command("ls")
def list_engines(
    where: Where = None,
    socket: Socket = None,
    key_env: KeyEnv = None,
    ca: TrustedCa = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """List the engines: their state, the requests that need them, and who named them."""
    show = import_module("disagg.router.engines_client").show
    raise typer.Exit(show(operator(where, socket, key_env, ca), as_json=as_json))


@engines.command("add")
def add_engines(
    where: Where = None,
    socket: Socket = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="URL of a decode engine; repeat for more.")
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(help="URL of a prefill engine; repeat for more.")
    ] = None,
    key_env: KeyEnv = None,
    ca: TrustedCa = None,
) -> None:
    """Add engines that are already running, or take back their removal."""
    add = import_module("disagg.router.engines_client").add
    client = operator(where, socket, key_env, ca)
    raise typer.Exit(add(client, prefill or [], decode or []))


@engines.command("remove")
def remove_engines(
    name: Annotated[
        list[str], typer.Option(help="The engine's name, such as decode-1; repeat for more.")
    ],
    where: Where = None,
    socket: Socket = None,
    key_env: KeyEnv = None,
    ca: TrustedCa = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when they are gone.")] = (False),
    timeout: LongestWait = 600.0,
) -> None:
    """Let engines drain: they get no new requests, and those in flight end undisturbed.

    An engine is gone when no request needs it, or after limits.drain_s. It is not stopped.
    """
    remove = import_module("disagg.router.engines_client").remove
    client = operator(where, socket, key_env, ca)
    raise typer.Exit(remove(client, name, wait=wait, timeout_s=timeout))


@app.command(rich_help_panel=PANEL)
def status(
    where: Where = None,
    socket: Socket = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C (exit status 0).")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.5, metavar="S", help="Seconds between two looks of --watch.")
    ] = 2.0,
    key_env: KeyEnv = None,
    ca: TrustedCa = None,
) -> None:
    """Show a running router's engines, pairings, handoffs and recent failures.

    Exit status 0 if every engine is up, 1 if not. With --watch: the last ten minutes, too.
    """
    if watch and as_json:
        raise ConfigError("--watch, --json: give one of them")
    if watch:
        keep_showing = import_module("disagg.router.status_watch").run
        raise typer.Exit(keep_showing(operator(where, socket, key_env, ca), every))
    from disagg.router.status_client import run

    raise typer.Exit(run(operator(where, socket, key_env, ca), as_json=as_json))


@app.command(rich_help_panel=PANEL)
def dashboard(
    url: Annotated[
        str | None, typer.Option(help="URL of a running Grafana that gets the dashboard.")
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable with a Grafana token (role Editor)."
        ),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM certificates to trust.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the files of a new Prometheus and Grafana."),
    ] = None,
    router: Annotated[
        str, typer.Option(help="With --folder: URL of the router that Prometheus scrapes.")
    ] = "http://127.0.0.1:8000",
    prometheus: Annotated[
        str, typer.Option(help="With --folder: URL of the Prometheus that Grafana queries.")
    ] = "http://127.0.0.1:9090",
) -> None:
    """Set up the Grafana dashboard: in a running Grafana, or as files for a new one."""
    from disagg.dashboards import provision

    if (url is None) == (folder is None):
        raise ConfigError("--url, --folder: give one of them")
    if url is not None:
        typer.echo(provision.send(url, token_env, ca))
    if folder is not None:
        for path in provision.write(folder, router, prometheus):
            typer.echo(str(path))
