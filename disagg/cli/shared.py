"""Arguments and options that several commands share, and what all of them do."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE|MODEL",
        help="The deployment's YAML; or a model: a checkpoint's folder, or its name on the hub.",
    ),
]
Prefill = Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of prefill engines.")]
Decode = Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of decode engines.")]
Port = Annotated[
    int | None,
    typer.Option(
        "--port", "-p", min=0, max=65535, help="Port of the router; 0 takes any free one."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of the file, such as engine.args.dtype=float32; repeat for more.",
    ),
]
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
# Its name before WHERE could be a socket's path; removed in 0.3.
Socket = Annotated[Path | None, typer.Option("--socket", hidden=True)]
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

Timeout = Annotated[float, typer.Option(help="Longest wait, in seconds; then status 1.")]


def deployments_of(
    target: str,
    prefill: int | None,
    decode: int | None,
    port: int | None,
    changes: list[str] | None,
) -> list[Any]:
    """The deployments of a file, or one for a model that suits this machine, with what options
    change. Raises ConfigError."""
    from disagg import config

    counts = {"prefill.replicas": prefill, "decode.replicas": decode, "router.port": port}
    words = [f"{key}={value}" for key, value in counts.items() if value is not None]
    words += changes or []
    path = Path(target)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        return config.load_all(path, words)
    from disagg.preflight import starter

    made = starter.deployment(
        target, starter.Machine.here(), prefill=prefill or 1, decode=decode or 1
    )
    return config.read(made, words)


def unwind_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that context managers stop the started processes."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def operator(where: str | None, socket: Path | None, key_env: str | None, ca: Path | None) -> Any:
    """How commands reach a router; see `OperatorClient`."""
    at = where if socket is None else str(socket.absolute())
    return import_module("disagg.router.operator_client").OperatorClient(at, key_env, ca)


def only_given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def warn(warnings: list[str]) -> None:
    """Print the warnings."""
    for line in warnings:
        typer.echo(f"warning: {line}", err=True)
