"""The command line. It calls other modules and prints; it must never decide anything itself.

Each command imports its heavy modules itself, so that `disagg --help` answers at once. Exit status:
0 done, 1 something failed, 2 the configuration is wrong.
"""

from __future__ import annotations

import json
import signal
import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from disagg import options
from disagg.errors import ConfigError, DisaggError, StartupError

app = typer.Typer(
    help="Serve large language models with prefill and decode apart, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Connector(StrEnum):
    """The values of `--connector`."""

    disagg = "disagg"
    nixl = "nixl"
    example = "example"


File = Annotated[Path, typer.Argument(metavar="FILE", help="The deployment's YAML.")]
_PASS_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def main() -> None:
    """Run one command. A `DisaggError` is printed in readable lines, without a traceback."""
    try:
        app()
    except DisaggError as error:
        sys.exit(_report(error))


@app.command()
def serve(file: File) -> None:
    """Run a file's deployments in the foreground, here or on a Ray cluster (RAY_ADDRESS)."""
    from disagg import config
    from disagg.preflight import checks

    deployments = config.load_all(file)
    _warn(checks.check(*deployments))
    raise typer.Exit(import_module("disagg.cluster").serve(deployments))


@app.command()
def check(
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not YAML.")] = False,
) -> None:
    """Check a file against this machine, start nothing, and print what would run."""
    import yaml

    from disagg import config
    from disagg.preflight import checks
    from disagg.preflight.resolved_plan import resolve_all

    deployments = config.load_all(file)
    _warn(checks.check(*deployments))
    resolved = resolve_all(deployments)
    if as_json:
        typer.echo(json.dumps(resolved, indent=2))
    else:
        typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)


@app.command()
def plan(
    speeds: Annotated[
        Path, typer.Option(metavar="FILE", help="The file that `disagg bench speeds` wrote.")
    ],
    ttft: Annotated[float, typer.Option(help="Target: seconds to the first token.")],
    itl: Annotated[
        float, typer.Option(help="Target: mean seconds between the tokens of a request.")
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requests with the fields at, prompt_tokens, output_tokens: JSON lines, "
            "or a .csv file with these headers.",
        ),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            help="Instead of --trace: requests=N,prompt=MEAN,output=MEAN[,sigma=S] (log-normal)."
        ),
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of the requests that must meet both targets, 0 to 1.")
    ] = 0.9,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second. Scales the trace's arrivals; a trace without arrivals "
            "gets Poisson arrivals."
        ),
    ] = None,
    prefill_cost: Annotated[
        float, typer.Option(help="Cost of one prefill engine, in any unit.")
    ] = 1.0,
    decode_cost: Annotated[
        float, typer.Option(help="Cost of one decode engine, in the same unit.")
    ] = 1.0,
    local_prefill_tokens: options.LocalPrefillTokens = 64,
    prefill_wait_share: options.PrefillWaitShare = None,
    first_token: options.FirstToken = "decode",
    first_token_hold_s: options.FirstTokenHoldS = 0.0,
    prefill: Annotated[
        int | None,
        typer.Option(min=0, help="Simulate this number of prefill engines instead of searching."),
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help="With --prefill: the number of decode engines.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Find how many prefill and decode engines a load needs, by simulation.

    Exit status 1 if no number of engines meets the targets.
    """
    from disagg.planning.report import Question, run
    from disagg.planning.simulation import Routing

    routing = Routing(local_prefill_tokens, prefill_wait_share, first_token, first_token_hold_s)
    question = Question(
        trace=trace,
        synthetic=synthetic,
        speeds=speeds,
        ttft=ttft,
        itl=itl,
        share=share,
        prefill_cost=prefill_cost,
        decode_cost=decode_cost,
        rate=rate,
        routing=routing,
        seed=seed,
        prefill=prefill,
        decode=decode,
    )
    raise typer.Exit(run(question, as_json=as_json))


@app.command("make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")],
    layers: Annotated[int, typer.Option(help="Number of transformer layers.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 256,
    kv_heads: Annotated[int, typer.Option(help="Number of key-value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(help="Size of one head.")] = 64,
    vocab_size: Annotated[int, typer.Option(help="Size of the vocabulary, in tokens.")] = 4096,
    seed: Annotated[
        int, typer.Option(help="Seed of the weights: the same seed gives the same bytes.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    max_position_embeddings: Annotated[
        int, typer.Option(help="Longest context, in tokens.")
    ] = 32768,
) -> None:
    """Write a small Qwen3 checkpoint with random weights that vLLM loads. Needs no model hub."""
    from disagg.testing import checkpoint

    made = checkpoint.make_model(
        folder,
        layers=layers,
        hidden=hidden,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        seed=seed,
        dtype=dtype,
        max_position_embeddings=max_position_embeddings,
    )
    typer.echo(f"{folder}: {'written' if made else 'already there'}")


@app.command()
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
        "pairing": _given(pairing),
        "cors": _given(cors),
    }
    section = config.load_router(file, _given(given))
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


RouterUrl = Annotated[
    str | None, typer.Argument(metavar="URL", help="The router's URL; needs --key-env.")
]
RouterSocket = Annotated[
    Path | None,
    typer.Option("--socket", metavar="PATH", help="The router's own socket; needs no key."),
]
AdminKeyEnv = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Environment variable with an admin key of the router."),
]
TrustedCa = Annotated[
    Path | None, typer.Option("--ca", metavar="FILE", help="PEM certificates to trust.")
]
LongestWait = Annotated[float, typer.Option(help="Longest wait of --wait, in seconds.")]


@app.command()
def drain(
    url: RouterUrl = None,
    admin_socket: RouterSocket = None,
    key_env: AdminKeyEnv = None,
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
    client = _operator(url, admin_socket, key_env, ca)
    raise typer.Exit(run(client, wait=wait, undo=undo, timeout_s=timeout))


engines = typer.Typer(
    help="List, add and remove the engines of a running `disagg router`.", no_args_is_help=True
)
app.add_typer(engines, name="engines")


@engines.command("ls")
def list_engines(
    url: RouterUrl = None,
    admin_socket: RouterSocket = None,
    key_env: AdminKeyEnv = None,
    ca: TrustedCa = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """List the engines: their state, the requests that need them, and who named them."""
    show = import_module("disagg.router.engines_client").show
    raise typer.Exit(show(_operator(url, admin_socket, key_env, ca), as_json=as_json))


@engines.command("add")
def add_engines(
    url: RouterUrl = None,
    decode: Annotated[
        list[str] | None, typer.Option(help="URL of a decode engine; repeat for more.")
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option(help="URL of a prefill engine; repeat for more.")
    ] = None,
    admin_socket: RouterSocket = None,
    key_env: AdminKeyEnv = None,
    ca: TrustedCa = None,
) -> None:
    """Add engines that are already running, or take back their removal."""
    add = import_module("disagg.router.engines_client").add
    client = _operator(url, admin_socket, key_env, ca)
    raise typer.Exit(add(client, prefill or [], decode or []))


@engines.command("remove")
def remove_engines(
    name: Annotated[
        list[str], typer.Option(help="The engine's name, such as decode-1; repeat for more.")
    ],
    url: RouterUrl = None,
    admin_socket: RouterSocket = None,
    key_env: AdminKeyEnv = None,
    ca: TrustedCa = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when they are gone.")] = (False),
    timeout: LongestWait = 600.0,
) -> None:
    """Let engines drain: they get no new requests, and those in flight end undisturbed.

    An engine is gone when no request needs it, or after limits.drain_s. It is not stopped.
    """
    remove = import_module("disagg.router.engines_client").remove
    client = _operator(url, admin_socket, key_env, ca)
    raise typer.Exit(remove(client, name, wait=wait, timeout_s=timeout))


@app.command()
def status(
    url: Annotated[str, typer.Argument(help="The router's URL.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
    admin_socket: Annotated[
        Path | None,
        typer.Option(
            "--socket", metavar="PATH", help="The router's own socket, instead of the URL."
        ),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with an API or admin key. With one, failures have ids and "
            "reasons.",
        ),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM certificate to trust, for a router with TLS.")
    ] = None,
) -> None:
    """Show a running router's engines, pairings, handoffs and recent failures.

    Exit status 0 if every engine is up, 1 if not.
    """
    from disagg.router.status_client import run

    raise typer.Exit(run(url, admin_socket=admin_socket, key_env=key_env, ca=ca, as_json=as_json))


Address = Annotated[
    str | None,
    typer.Option(
        help="Ray's address. Default: RAY_ADDRESS, or the deployments of this user on this machine."
    ),
]
Wait = Annotated[bool, typer.Option(help="Show the progress, and return when the change is done.")]


@app.command()
def scale(
    counts: Annotated[list[str], typer.Argument(metavar="POOL=N", help="prefill=3 decode=2")],
    name: Annotated[str | None, typer.Option(help="The deployment's name, if several run.")] = None,
    address: Address = None,
    wait: Wait = True,
) -> None:
    """Change the numbers of engines. An engine that leaves finishes its requests first.

    Exit status 0 when the change is done, 2 if it was refused.
    """
    replicas = import_module("disagg.config").replicas_of(counts)
    run = import_module("disagg.cluster.commands").scale
    raise typer.Exit(run(replicas, name=name, address=address, wait=wait))


@app.command()
def apply(file: File, address: Address = None, wait: Wait = True) -> None:
    """Replace a running deployment's engines to match a changed file, one by one.

    No request fails. Exit status:
    0 when all engines are replaced;
    1 if an engine did not start and the change was undone;
    2 if the file is wrong or a change needs a restart of the deployment.
    """
    from disagg import config
    from disagg.preflight import checks

    deployments = config.load_all(file)
    _warn(checks.check(*deployments, running=True))
    run = import_module("disagg.cluster.commands").apply
    raise typer.Exit(run(deployments, address=address, wait=wait))


@app.command()
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


@app.command()
def demo() -> None:
    """Serve a small model on CPU, hand caches off, and compare the answers with a single engine."""
    _unwind_on_sigterm()
    raise typer.Exit(import_module("disagg.testing.demo").run())


@app.command(context_settings=_PASS_ON)
def bench(ctx: typer.Context) -> None:
    """Run a benchmark; `disagg bench --help` lists them."""
    _unwind_on_sigterm()
    # Imported here only: the benchmarks' typer app imports the modules that it measures.
    import_module("disagg.bench.cli").app(args=ctx.args, prog_name="disagg bench")


@app.command()
def version() -> None:
    """Print the version."""
    from disagg import __version__

    typer.echo(__version__)


def _unwind_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that context managers stop the started processes."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def _operator(
    url: str | None, admin_socket: Path | None, key_env: str | None, ca: Path | None
) -> Any:
    operator_client = import_module("disagg.router.operator_client").OperatorClient
    return operator_client(url, admin_socket, key_env, ca)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _warn(warnings: list[str]) -> None:
    for line in warnings:
        typer.echo(f"warning: {line}", err=True)


def _report(error: DisaggError) -> int:
    if isinstance(error, ConfigError):
        for line in error.problems:
            typer.echo(line, err=True)
        return 2
    typer.echo(f"error: {error}", err=True)
    if isinstance(error, StartupError) and error.log_tail:
        typer.echo(f"\nThe last lines of its log:\n{error.log_tail}", err=True)
    return 1


if __name__ == "__main__":
    main()
