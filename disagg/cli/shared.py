"""Arguments and options that several commands share, and what all of them do."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

File = Annotated[Path, typer.Argument(metavar="FILE", help="The deployment's YAML.")]
Where = Annotated[
    str | None,
    typer.Argument(
        metavar="WHERE",
        help="The deployment's name; or the router's URL; or the path of its socket. Default: the "
        "deployment on this machine, or http://127.0.0.1:8000.",
    ),
]
Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The deployment's name. Default: the only one."),
]
KeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable with a key of the router, for its URL; its socket needs none.",
    ),
]
TrustedCa = Annotated[
    Path | None, typer.Option("--ca", metavar="FILE", help="PEM certificates to trust.")
]
LongestWait = Annotated[float, typer.Option(help="Longest wait of --wait, in seconds.")]
Address = Annotated[
    str | None,
    typer.Option(
        help="Ray's address. Default: RAY_ADDRESS, or the deployments of this user on this machine."
    ),
]
Wait = Annotated[bool, typer.Option(help="Show the progress, and return when the change is done.")]


def unwind_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that context managers stop the started processes."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def operator(where: str | None, key_env: str | None, ca: Path | None) -> Any:
    """How commands reach a router; see `OperatorClient`."""
    return import_module("disagg.router.operator_client").OperatorClient(where, key_env, ca)


def only_given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def warn(warnings: list[str]) -> None:
    """Print the warnings."""
    for line in warnings:
        typer.echo(f"warning: {line}", err=True)
