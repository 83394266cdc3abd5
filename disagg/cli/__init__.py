"""The command line. It calls other modules and prints; it must never decide anything itself.

Each command imports its heavy modules itself, so that `disagg --help` answers at once. Exit status:
0 done, 1 something failed, 2 the configuration is wrong.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from disagg import __version__
from disagg.bench import cli as bench
from disagg.cli import deployment, router, trials
from disagg.errors import ConfigError, DisaggError, StartupError

HELP = {"help_option_names": ["-h", "--help"]}
# What is in an extra, by the name under which it is imported.
_OF_EXTRAS = {"vllm", "ray", "torch", "transformers", "openai", "cupy", "gguf", "accelerate"}

app = typer.Typer(
    help="Serve large language models with prefill and decode apart, on Ray.",
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
)
for part in (deployment.app, router.app, trials.app):
    app.add_typer(part)
app.add_typer(bench.app, name="bench", rich_help_panel=trials.PANEL)
app.add_typer(router.engines, name="engines", rich_help_panel=router.PANEL)


def main() -> None:
    """Run one command. A `DisaggError` is printed in readable lines, without a traceback."""
    try:
        app(prog_name="disagg")
    except DisaggError as error:
        sys.exit(_report(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OF_EXTRAS:
            raise
        typer.echo(
            f'{package}: not installed; pip install "disagg[cpu]" for CPUs, "disagg[gpu]" for GPUs',
            err=True,
        )
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Only what is the same for all commands."""


def _report(error: DisaggError) -> int:
    if isinstance(error, ConfigError):
        for line in error.problems:
            typer.echo(line, err=True)
        return 2
    typer.echo(f"error: {error}", err=True)
    if isinstance(error, StartupError) and error.log_tail:
        typer.echo(f"\nThe last lines of its log:\n{error.log_tail}", err=True)
    return 1
