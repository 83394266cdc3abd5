"""Commands that start, change and show deployments."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from disagg.cli.shared import (
    Address,
    Changes,
    Decode,
    File,
    Name,
    Port,
    Prefill,
    Target,
    Timeout,
    Wait,
    deployments_of,
    warn,
)

PANEL = "Serve"

app = typer.Typer()


@app.command(rich_help_panel=PANEL)
def serve(
    target: Target,
    prefill: Prefill = None,
    decode: Decode = None,
    port: Port = None,
    changes: Changes = None,
) -> None:
    """Serve a file's deployments, or a model, in the foreground: here or on a Ray cluster.

    It joins the Ray that RAY_ADDRESS names. Options override the file.
    """
    from disagg.preflight import checks

    deployments = deployments_of(target, prefill, decode, port, changes)
    warn(checks.check(*deployments))
    raise typer.Exit(import_module("disagg.cluster").serve(deployments))


@app.command(rich_help_panel=PANEL)
def init(
    model: Annotated[
        str, typer.Argument(help="A checkpoint's folder, or its name on the hub.")
    ] = ".cache/models/smollm2-135m",
    file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
    ] = Path("disagg.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Write a commented file that serves a model on this machine."""
    from disagg.preflight import starter

    machine = starter.Machine.here()
    starter.write(file, model, machine, replace=force)
    typer.echo(f"{file}: written for {machine}\nnext: disagg serve {file}")
    if starter.is_missing(model):
        typer.echo(f"the model is not there yet: disagg get-model {Path(model).name}")


@app.command(rich_help_panel=PANEL)
def schema() -> None:
    """Print the JSON Schema of the deployment's YAML, with which editors complete and check it."""
    from disagg import config

    typer.echo(json.dumps(config.schema(), indent=2))


@app.command(rich_help_panel=PANEL)
def check(
    target: Target,
    prefill: Prefill = None,
    decode: Decode = None,
    port: Port = None,
    changes: Changes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not YAML.")] = False,
) -> None:
    """Check a file against this machine, start nothing, and print what would run."""
    import yaml

    from disagg.preflight import checks
    from disagg.preflight.resolved_plan import resolve_all

    deployments = deployments_of(target, prefill, decode, port, changes)
    warn(checks.check(*deployments))
    resolved = resolve_all(deployments)
    if as_json:
        typer.echo(json.dumps(resolved, indent=2))
    else:
        typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)


@app.command(rich_help_panel=PANEL)
def scale(
    counts: Annotated[list[str], typer.Argument(metavar="POOL=N", help="prefill=3 decode=2")],
    name: Annotated[str | None, typer.Option(help="The deployment's name, if several run.")] = None,
    address: Address = None,
    wait: Wait = True,
    timeout: Timeout = 1800.0,
) -> None:
    """Change the numbers of engines. An engine that leaves finishes its requests first.

    Exit status 0 when the change is done, 2 if it was refused.
    """
    replicas = import_module("disagg.config").replicas_of(counts)
    run = import_module("disagg.cluster.commands").scale
    raise typer.Exit(run(replicas, name=name, address=address, wait_s=timeout if wait else 0))


@app.command(rich_help_panel=PANEL)
def apply(
    file: File,
    changes: Changes = None,
    address: Address = None,
    wait: Wait = True,
    timeout: Timeout = 3600.0,
) -> None:
    """Replace a running deployment's engines to match a changed file, one by one.

    No request fails. Exit status:
    0 when all engines are replaced;
    1 if an engine did not start and the change was undone;
    2 if the file is wrong or a change needs a restart of the deployment.
    """
    from disagg import config
    from disagg.preflight import checks

    deployments = config.load_all(file, changes or ())
    warn(checks.check(*deployments, running=True))
    run = import_module("disagg.cluster.commands").apply
    raise typer.Exit(run(deployments, address=address, wait_s=timeout if wait else 0))


@app.command(rich_help_panel=PANEL)
def ls(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """List the deployments of this user on this machine."""
    raise typer.Exit(import_module("disagg.local.commands").show(as_json=as_json))


@app.command(rich_help_panel=PANEL)
def stop(
    name: Name = None,
    timeout: Annotated[float, typer.Option(help="Longest wait for the end, in seconds.")] = 60.0,
) -> None:
    """Stop a deployment on this machine, as Ctrl-C in its terminal does; return when it ended."""
    raise typer.Exit(import_module("disagg.local.commands").stop(name, timeout_s=timeout))


@app.command(rich_help_panel=PANEL)
def logs(
    name: Name = None,
    engine: Annotated[
        str | None, typer.Option(help="An engine's name, such as decode-0. Default: all engines.")
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Last lines.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    address: Address = None,
) -> None:
    """Print the last lines that engines logged, also while they start."""
    run = import_module("disagg.cluster.commands").logs
    raise typer.Exit(run(name, engine=engine, lines=lines, follow=follow, address=address))
