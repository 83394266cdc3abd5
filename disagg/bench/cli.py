"""`disagg bench …`: one command per thing that is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg import options
from disagg.errors import ConfigError
from disagg.transport.names import PREFERENCE, TransportName

# All that move between CPU engines.
ON_CPU = "process_memory,tcp,shared_storage"

app = typer.Typer(help="Measure, ours and the peer in one run.", no_args_is_help=True)


@app.callback()
def main(
    ctx: typer.Context,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a results file for the pages into this folder: benchmarks/results.",
        ),
    ] = None,
) -> None:
    """Measure, ours and the peer in one run."""
    from disagg.testing.results import recording

    if ctx.invoked_subcommand not in (None, "pages"):
        ctx.with_resource(recording(str(ctx.invoked_subcommand), results))


@app.command()
def pages(
    results: Annotated[Path, typer.Argument(help="The results files.")] = Path(
        "benchmarks/results"
    ),
    out: Annotated[Path, typer.Argument(help="The pages.")] = Path("docs/benchmarks"),
) -> None:
    """Make the pages of docs/benchmarks again from the newest results of each command."""
    from disagg.bench.pages import update

    for page in update(results, out):
        typer.echo(f"made again: {page}")


@app.command()
def handoff(
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = "1000,4000,8000",
    repeats: Annotated[
        int, typer.Option(min=1, help="Prompts per length. The table has medians.")
    ] = 3,
    storage: Annotated[Path, typer.Option(help="Folder for files of ours and of the peer.")] = Path(
        "/dev/shm"
    ),
    transport: Annotated[str, typer.Option(help=f"Ours, of {PREFERENCE}.")] = "process_memory",
    peers: Annotated[
        str, typer.Option(help="example, nixl; separated by commas, may be empty.")
    ] = "example",
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.")
    ] = None,
) -> None:
    """Time decode's first token: after a handoff, from its own cache, by peers, computed."""
    from disagg.bench.first_token import handoff as bench

    counts = [int(length) for length in lengths.split(",")]
    (way,) = _transports(transport)
    names = [name for name in peers.split(",") if name]
    raise typer.Exit(
        bench.run(counts, repeats, storage, transport=way, peers=names, json_path=json)
    )


@app.command()
def offload(
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = "1000,4000,8000",
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Prompts per length, with four pairs of decodes each."),
    ] = 3,
    storage: Annotated[
        Path, typer.Option(help="Folder in which to make the directory tier.")
    ] = Path("/dev/shm"),
    host_bytes: Annotated[int, typer.Option(min=1, help="Bytes of the host memory tier.")] = 2
    << 30,
    peers: Annotated[
        str, typer.Option(help="vLLM's own: offloading, simple; separated by commas, may be empty.")
    ] = "offloading,simple",
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.")
    ] = None,
) -> None:
    """Time the first token of a prompt in the engine's cache, in each tier, and computed."""
    from disagg.bench.first_token import offload as bench

    counts, names = _numbers(lengths), [name for name in peers.split(",") if name]
    raise typer.Exit(
        bench.run(counts, repeats, storage, host_bytes=host_bytes, peers=names, json_path=json)
    )


@app.command()
def speeds(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("speeds.json"),
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = "128,512,1000,2000,4000,6000",
    batches: Annotated[
        str, typer.Option(help="How many sequences decode at once, separated by commas.")
    ] = "1,4,8,16",
    contexts: Annotated[
        str, typer.Option(help="Tokens of each sequence, separated by commas.")
    ] = "128,1000,4000",
    repeats: Annotated[
        int, typer.Option(min=1, help="Repetitions of each measurement; one more warms up.")
    ] = 3,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="vLLM's setting, for both engines.")
    ] = 2048,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="vLLM's setting, for both engines.")
    ] = 64,
    load_threads: Annotated[int, typer.Option(min=1, help="Handoffs at once.")] = 8,
    prefill: Annotated[str | None, typer.Option(help="URL of a prefill engine.")] = None,
    decode: Annotated[
        str | None, typer.Option(help="URL of a decode engine; without both, a pair is started.")
    ] = None,
    note: Annotated[str, typer.Option(help="A note for the file.")] = "",
) -> None:
    """Measure how fast engines compute prompts and tokens, and hand off: for disagg plan."""
    from disagg.bench.speeds import run as bench

    plan = bench.SpeedsPlan(
        lengths=_numbers(lengths),
        batches=_numbers(batches),
        contexts=_numbers(contexts),
        repeats=repeats,
        batched_tokens=max_num_batched_tokens,
        seqs=max_num_seqs,
        parallel=load_threads,
        prefill=prefill,
        decode=decode,
        note=note,
    )
    raise typer.Exit(bench.run(plan, out))


@app.command()
def predicted(
    pairs: Annotated[
        str, typer.Option(help="Numbers of engines of each role, separated by commas.")
    ] = "1,2",
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 0.5,
    duration: Annotated[float, typer.Option(help="Seconds of load on each deployment.")] = 60,
    mix: Annotated[
        str, typer.Option(help="SHARE:PROMPT:OUTPUT in tokens, separated by commas.")
    ] = "0.6:128:64,0.4:2000:64",
    local_prefill_tokens: options.LocalPrefillTokens = 256,
    speeds: Annotated[
        Path | None,
        typer.Option(help="Speeds file of an earlier run. Without it, speeds are measured first."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, kinds and choices.")] = 1,
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.")
    ] = None,
) -> None:
    """Compare what disagg plan predicts for a load with what real engines do."""
    from disagg.bench.serve.trace import parse_mix
    from disagg.bench.speeds import predicted as bench
    from disagg.bench.speeds.run import SpeedsPlan

    measuring = SpeedsPlan(
        lengths=[128, 512, 1000, 2000, 4000],
        batches=[1, 4, 8, 16],
        contexts=[128, 1000, 3000],
        repeats=2,
        batched_tokens=2048,
        seqs=64,
        parallel=8,
        prefill=None,
        decode=None,
        note="",
    )
    plan = bench.PredictionPlan(
        pairs=_numbers(pairs),
        rate=rate,
        duration_s=duration,
        kinds=parse_mix(mix),
        local_prefill_tokens=local_prefill_tokens,
        seed=seed,
        speeds=measuring,
        file=speeds,
    )
    raise typer.Exit(bench.run(plan, json_path=json))


@app.command()
def soak(
    requests: Annotated[int, typer.Option(min=1)] = 2000,
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
    cancel: Annotated[float, typer.Option(help="Share of clients that disconnect early.")] = 0.2,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML of a deployment in float32. Without it: a small one."
        ),
    ] = None,
    transports: Annotated[
        str | None, typer.Option(help=f"By commas; the YAML's, or {ON_CPU}.")
    ] = None,
    sabotage: Annotated[
        bool, typer.Option(help="Cut sockets and stop workers during the load.")
    ] = True,
) -> None:
    """Send many requests under faults: no wrong token, no lease, block or file left."""
    from disagg.chaos import soak as bench

    wanted = transports or (None if config else ON_CPU)
    names = _transports(wanted) if wanted else None
    status = bench.run(
        requests, concurrency, cancel, file=config, transports=names, sabotage=sabotage
    )
    raise typer.Exit(status)


@app.command()
def heal(
    clients: Annotated[
        int, typer.Option(min=1, help="Clients that send requests all the time.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=0, help="How often each of four engines dies.")] = 1,
    nodes: Annotated[
        int, typer.Option(help="Ray nodes. With three or more, one node dies too.")
    ] = 1,
) -> None:
    """Kill engines and the router under load: what clients see, and when all serve again."""
    from disagg.chaos import heal as bench

    raise typer.Exit(bench.run(clients, rounds, nodes))


@app.command()
def scale(
    clients: Annotated[
        int, typer.Option(min=1, help="Clients that send requests all the time.")
    ] = 2,
    waves: Annotated[
        int,
        typer.Option(min=0, help="How often the clients come and go; the autoscaler must follow."),
    ] = 0,
    half: Annotated[
        float, typer.Option(help="Seconds that the clients stay, and stay away.")
    ] = 100.0,
) -> None:
    """Scale up and down and replace all engines under load: no client may notice."""
    from disagg.chaos import scale as bench

    raise typer.Exit(bench.run_waves(clients, waves, half) if waves else bench.run(clients))


@app.command()
def router(
    requests: Annotated[
        int, typer.Option(help="Requests of each batch, at least 4 a client.")
    ] = 400,
    rounds: Annotated[
        int, typer.Option(help="Repetitions; one more warms up. The table has medians.")
    ] = 8,
    clients: Annotated[
        str, typer.Option(help="Clients at once, separated by commas.")
    ] = "1,16,64,256",
    mode: Annotated[
        str, typer.Option(help="Answers as a stream, in one piece (whole), or both.")
    ] = "both",
    targets: Annotated[
        str, typer.Option(help="Separated by commas. Our router is in three settings.")
    ] = "direct,ours,ours-2-processes,ours-migration,vllm-router",
    pace_ms: Annotated[
        float, typer.Option(help="Milliseconds between two tokens of an answer.")
    ] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.")
    ] = None,
) -> None:
    """Measure what a router costs: no router, ours, vllm-router; with fake engines."""
    from disagg.bench.router import run as bench

    plan = bench.RouterBenchPlan(
        requests=requests,
        rounds=rounds,
        clients=_numbers(clients),
        modes=["stream", "whole"] if mode == "both" else [mode],
        targets=[name for name in targets.split(",") if name],
        pace_ms=pace_ms,
    )
    raise typer.Exit(bench.run(plan, json_path=json))


@app.command()
def router_faults(
    requests: Annotated[
        int, typer.Option(min=1, help="All combinations of faults are 380.")
    ] = 10_000,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 1,
    first_token: options.FirstToken = "decode",
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.")
    ] = None,
) -> None:
    """Run the router with engines that fail on purpose: right, or one error, in time."""
    from disagg.chaos import router_faults as bench

    raise typer.Exit(bench.run(requests, clients, seed, first_token, json_path=json))


@app.command()
def serve(
    rates: Annotated[
        str, typer.Option(help="Requests a second, separated by commas.")
    ] = "0.5,1,1.5,2",
    duration: Annotated[float, typer.Option(help="Seconds of load at each rate.")] = 24,
    mix: Annotated[
        str, typer.Option(help="SHARE:PROMPT:OUTPUT in tokens, separated by commas.")
    ] = "0.5:128:64,0.5:1500:64",
    repeat_share: Annotated[
        float, typer.Option(help="Share of requests that repeat an earlier prompt.")
    ] = 0,
    ttft_target: Annotated[float, typer.Option(help="Seconds to the first token.")] = 2,
    itl_target: Annotated[float, typer.Option(help="Seconds between tokens.")] = 0.1,
    ways: Annotated[
        str,
        typer.Option(
            help="colocated, apart, apart-all; separated by commas. Empty: write traces only."
        ),
    ] = "colocated,apart",
    local_prefill_tokens: options.LocalPrefillTokens = 256,
    prefill_wait_share: options.PrefillWaitShare = None,
    first_token: options.FirstToken = "decode",
    first_token_hold_s: options.FirstTokenHoldS = 0.0,
    batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="vLLM's max_num_batched_tokens, of all engines.")
    ] = None,
    decode_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="The same for the decode engine only.")
    ] = None,
    prefill_seqs: Annotated[
        int | None, typer.Option(min=1, help="vLLM's max_num_seqs, of the prefill engine alone.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, kinds and prompts.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this file instead of rates and mix.")
    ] = None,
    write_trace: Annotated[
        Path | None, typer.Option(help="Write the load here; of several rates, a file each.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.")
    ] = None,
) -> None:
    """Measure goodput of one load on two colocated engines, and on prefill and decode apart."""
    from disagg.bench.serve import run as bench
    from disagg.bench.serve.score import Targets
    from disagg.bench.serve.trace import parse_mix

    plan = bench.ServePlan(
        ways=[name for name in ways.split(",") if name],
        rates=_rates(rates),
        duration_s=duration,
        kinds=parse_mix(mix),
        repeat_share=repeat_share,
        targets=Targets(ttft_target, itl_target),
        local_prefill_tokens=local_prefill_tokens,
        prefill_wait_share=prefill_wait_share,
        first_token=first_token,
        first_token_hold_s=first_token_hold_s,
        batched_tokens=batched_tokens,
        decode_batched_tokens=decode_batched_tokens,
        prefill_seqs=prefill_seqs,
        seed=seed,
        trace=trace,
        write_trace=write_trace,
    )
    raise typer.Exit(bench.run(plan, json_path=json))


@app.command()
def transfer(
    transports: Annotated[
        str | None,
        typer.Option(help=f"Ours, by commas: {ON_CPU}; on GPUs cuda_ipc,nccl,tcp,shared_storage."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="MB of one fetch, by commas: 33,131,262; on GPUs 131,1074,8590."),
    ] = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of one block in each layer, by commas: 65536,1048576; on GPUs 65536."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers: 8; on GPUs 32.")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Fetches at once; several only while their sum fits the largest: 1,4; on GPUs 1."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the caches lie: cpu or cuda.")] = "cpu",
    staging_mb: Annotated[
        int, typer.Option(min=1, help="MiB on the GPU that each end may stage in.")
    ] = 64,
    repeats: Annotated[
        int, typer.Option(min=1, help="Repetitions; one more warms up. The table has medians.")
    ] = 5,
    peer: Annotated[bool, typer.Option(help="Measure NIXL over UCX too.")] = True,
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.")
    ] = None,
) -> None:
    """Measure whole fetches over each transport, beside their ceilings and NIXL."""
    from disagg.bench.transfer import run as bench
    from disagg.bench.transfer.plan import TransferPlan

    plan = TransferPlan.of(
        device,
        repeats,
        transports=[name for name in transports.split(",") if name] if transports else None,
        sizes=_numbers(sizes) if sizes else None,
        block_bytes=_numbers(block_bytes) if block_bytes else None,
        concurrency=_numbers(concurrency) if concurrency else None,
        layers=layers,
        staging_bytes=staging_mb << 20,
    )
    raise typer.Exit(bench.run(plan, with_peer=peer, json_path=json))


def _transports(text: str) -> list[TransportName]:
    wanted = text.split(",")
    known = [name for name in PREFERENCE if name in wanted]
    if strange := sorted(set(wanted) - set(known)):
        raise ConfigError(f"{', '.join(strange)}: no such transport; of {', '.join(PREFERENCE)}")
    return sorted(known, key=wanted.index)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"{text!r}: whole numbers, by commas") from None


def _rates(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--rates: {text!r} — numbers, by commas") from None
