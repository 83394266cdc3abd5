"""`disagg bench …`: one command for each measurement."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from disagg import options
from disagg.bench.html import writer
from disagg.bench.results import Output, load
from disagg.errors import ConfigError
from disagg.transport.names import TRANSPORTS, TransportName

# The transports that work between CPU engines.
ON_CPU = "process_memory,tcp,shared_storage"

Json = Annotated[Path | None, typer.Option(help="Also write the figures to this file.")]
Results = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Also write a results file here; the committed ones are in benchmarks/results.",
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write a page with tables and charts to this file."),
]

app = typer.Typer(
    help="Measure disagg and its peers side by side, and break it on purpose.",
    no_args_is_help=True,
)


@app.callback()
def _unwind_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that context managers stop the started processes."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


@app.command()
def handoff(
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths in tokens, comma-separated; by default 1000,4000,8000, and with "
            "--link or --steps 4096."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts per length; the median counts.")] = 3,
    storage: Annotated[
        Path, typer.Option(help="Folder for the files of shared_storage and ExampleConnector.")
    ] = Path("/dev/shm"),
    device: Annotated[str, typer.Option(help="Engines on cpu or on cuda.")] = "cpu",
    transport: Annotated[
        str | None,
        typer.Option(
            help=f"disagg's transport, one of {', '.join(TRANSPORTS)}; by default process_memory, "
            "cuda_ipc on GPUs, tcp with --link or --steps."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="vLLM connectors to compare with: example, nixl, and with --link nixl-push; "
            "comma-separated. By default example; with --link or --steps none."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Each engine on a network of its own, with a link between the two, for example "
            "25Gbit; auto: it takes as long as prefill. Needs root.",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Prefill steps of a prompt, comma-separated; with --link by default 4,16. Without "
            "--link: over tcp the same as --link auto, over other transports there is no link."
        ),
    ] = None,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Time to decode's first token: after a handoff, from its prefix cache, by peers, computed."""
    from disagg.bench.first_token import handoff as bench
    from disagg.bench.first_token import link as slow

    way = None if transport is None else _transports(transport)[0]
    output = Output(json, results, writer(html))
    if link or steps:
        if device != "cpu":
            raise ConfigError(f"--device: {device} — only cpu with --link or --steps")
        plan = slow.plan(
            link,
            _numbers(steps) if steps else (),
            _numbers(lengths) if lengths else (),
            repeats,
            transport=way,
            peers=[name for name in (peers or "").split(",") if name],
            storage=storage,
        )
        raise typer.Exit(slow.run(plan, output))
    counts = _numbers(lengths or "1000,4000,8000")
    names = [name for name in ("example" if peers is None else peers).split(",") if name]
    raise typer.Exit(
        bench.run(
            counts, repeats, storage, device=device, transport=way, peers=names, output=output
        )
    )


@app.command()
def offload(
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = (
        "1000,4000,8000"
    ),
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Prompts per length; for each, four pairs of decodes."),
    ] = 3,
    storage: Annotated[Path, typer.Option(help="Folder in which the file tier is made.")] = Path(
        "/dev/shm"
    ),
    host_bytes: Annotated[int, typer.Option(min=1, help="Size of the host memory tier.")] = 2 << 30,
    peers: Annotated[
        str,
        typer.Option(help="vLLM connectors to compare with: offloading, simple; comma-separated."),
    ] = "offloading,simple",
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Time to the first token: prompt in the engine's cache, in host memory, in files, computed."""
    from disagg.bench.first_token import offload as bench

    counts, names = _numbers(lengths), [name for name in peers.split(",") if name]
    output = Output(json, results, writer(html))
    raise typer.Exit(
        bench.run(counts, repeats, storage, host_bytes=host_bytes, peers=names, output=output)
    )


@app.command()
def speeds(
    out: Annotated[Path, typer.Option(help="The speeds file to write.")] = Path("speeds.json"),
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, comma-separated.")
    ] = "128,512,1000,2000,4000,6000",
    batches: Annotated[
        str, typer.Option(help="Sequences per decode step, comma-separated.")
    ] = "1,4,8,16",
    contexts: Annotated[
        str, typer.Option(help="Tokens per sequence, comma-separated.")
    ] = "128,1000,4000",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; one more warms up.")] = 3,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="vLLM's setting, of both engines.")
    ] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="vLLM's setting, of both engines.")] = 64,
    load_threads: Annotated[
        int, typer.Option(min=1, help="Handoffs at once: the connector's setting.")
    ] = 8,
    prefill: Annotated[str | None, typer.Option(help="URL of a running prefill engine.")] = None,
    decode: Annotated[
        str | None, typer.Option(help="URL of a running decode engine. Default: start a pair.")
    ] = None,
    note: Annotated[str, typer.Option(help="A note for the speeds file.")] = "",
    results: Results = None,
    html: Html = None,
) -> None:
    """Measure a pair of engines for `disagg plan`: prompts, decode steps, handoffs."""
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
    raise typer.Exit(bench.run(plan, out, Output(None, results, writer(html))))


@app.command()
def predicted(
    pairs: Annotated[str, typer.Option(help="Engines of each role, comma-separated.")] = "1,2",
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 0.5,
    duration: Annotated[float, typer.Option(help="Seconds of load for each number of pairs.")] = 60,
    mix: Annotated[
        str, typer.Option(help="SHARE:PROMPT:OUTPUT with lengths in tokens, comma-separated.")
    ] = "0.6:128:64,0.4:2000:64",
    local_prefill_tokens: options.LocalPrefillTokens = 256,
    speeds: Annotated[
        Path | None, typer.Option(help="A speeds file. Default: measure the speeds first.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, request kinds and pairings.")] = 1,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Compare the prediction of `disagg plan` with real engines under the same load."""
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
    raise typer.Exit(bench.run(plan, Output(json, results, writer(html))))


@app.command()
def soak(
    requests: Annotated[int, typer.Option(min=1)] = 2000,
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
    cancel: Annotated[float, typer.Option(help="Share of clients that disconnect early.")] = 0.2,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A float32 deployment. Default: a small one."),
    ] = None,
    transports: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated. Default: those of the file, or {ON_CPU}."),
    ] = None,
    sabotage: Annotated[
        bool, typer.Option(help="Cut sockets and stop workers during the run.")
    ] = True,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Send many requests, some clients disconnect: no wrong token, no lease or block kept."""
    from disagg.chaos import soak as bench

    wanted = transports or (None if config else ON_CPU)
    names = _transports(wanted) if wanted else None
    status = bench.run(
        requests,
        concurrency,
        cancel,
        file=config,
        transports=names,
        sabotage=sabotage,
        output=Output(json, results, writer(html)),
    )
    raise typer.Exit(status)


@app.command()
def heal(
    clients: Annotated[
        int, typer.Option(min=1, help="Clients that send requests all the time.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=0, help="Kills of each of the four engines.")] = 1,
    nodes: Annotated[int, typer.Option(help="Ray nodes; with three or more, one is killed.")] = 1,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Kill engines, the supervisor and the router under load: errors and time to recover."""
    from disagg.chaos import heal as bench

    raise typer.Exit(bench.run(clients, rounds, nodes, Output(json, results, writer(html))))


@app.command()
def scale(
    clients: Annotated[
        int, typer.Option(min=1, help="Clients that send requests all the time.")
    ] = 2,
    waves: Annotated[
        int, typer.Option(min=0, help="Test the autoscaler: clients come and go so many times.")
    ] = 0,
    half: Annotated[float, typer.Option(help="Seconds of half a wave.")] = 100.0,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Scale up, scale down and replace all engines under load: no client may see an error."""
    from disagg.chaos import scale as bench

    output = Output(json, results, writer(html))
    if waves:
        raise typer.Exit(bench.run_waves(clients, waves, half, output))
    raise typer.Exit(bench.run(clients, output))


@app.command()
def router(
    requests: Annotated[
        int, typer.Option(help="Requests per batch; at least 4 per client are sent.")
    ] = 400,
    rounds: Annotated[int, typer.Option(help="Rounds, medians count; one more warms up.")] = 8,
    clients: Annotated[str, typer.Option(help="Clients at once, comma-separated.")] = "1,16,64,256",
    mode: Annotated[str, typer.Option(help="Answers: stream, whole, or both.")] = "both",
    targets: Annotated[
        str,
        typer.Option(
            help="Comma-separated: no router, disagg's in six settings, vllm-router; and "
            "dynamo,ray-serve-llm, which bring engines of their own."
        ),
    ] = "direct,ours,ours-2-processes,ours-migration,ours-2-models,ours-all,ours-all-2-processes,"
    "vllm-router",
    pace_ms: Annotated[
        float, typer.Option(help="Milliseconds between two tokens of an answer.")
    ] = 0,
    knows: Annotated[
        bool,
        typer.Option("--knows", help="Instead: choices among 1,000 engines with known blocks."),
    ] = False,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Measure routers in front of fake engines: no router, disagg's, vllm-router and others."""
    if knows:
        from disagg.bench.router import known_blocks

        plan_of_blocks = known_blocks.KnownBlocksPlan()
        raise typer.Exit(known_blocks.run(plan_of_blocks, Output(json, results, writer(html))))
    from disagg.bench.router import run as bench

    plan = bench.RouterBenchPlan(
        requests=requests,
        rounds=rounds,
        clients=_numbers(clients),
        modes=["stream", "whole"] if mode == "both" else [mode],
        targets=[name for name in targets.split(",") if name],
        pace_ms=pace_ms,
    )
    raise typer.Exit(bench.run(plan, Output(json, results, writer(html))))


Trace = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="A Mooncake trace: JSON lines with timestamp and hash_ids."
    ),
]


@app.command()
def reuse(
    trace: Trace,
    engines: Annotated[
        str, typer.Option(help="Numbers of simulated prefill engines, comma-separated.")
    ] = "1000",
    cache_tokens: Annotated[int, typer.Option(help="Tokens that one engine's cache holds.")] = 1
    << 18,
    policies: Annotated[
        str, typer.Option(help="Pairing policies of the router, comma-separated.")
    ] = "cache_aware,prefix_affinity,least_loaded",
    shares: Annotated[
        bool,
        typer.Option(
            "--share-caches",
            help="Also: an engine that lacks a prefix gets it from another that holds it.",
        ),
    ] = False,
    computed_tokens_s: Annotated[
        float, typer.Option(help="Prompt tokens a second that one engine computes.")
    ] = 20_000,
    moved_tokens_s: Annotated[
        float, typer.Option(help="Tokens a second that an engine gets from another.")
    ] = 100_000,
    faster: Annotated[float, typer.Option(help="The trace's times are divided by it.")] = 1,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only so many of the first. Default: all.")
    ] = None,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Replay a public trace on simulated engines with the real pairing: what is computed twice?"""
    from disagg.bench.router import reuse as bench
    from disagg.bench.router.reuse_engines import Speeds

    plan = bench.ReusePlan(
        trace=trace,
        engines=_numbers(engines),
        cache_tokens=cache_tokens,
        policies=[name for name in policies.split(",") if name],
        speeds=Speeds(computed_tokens_s, moved_tokens_s),
        faster=faster,
        shares=shares,
        requests=requests,
    )
    raise typer.Exit(bench.run(plan, Output(json, results, writer(html))))


@app.command()
def evictions(
    trace: Trace,
    blocks: Annotated[
        str, typer.Option(help="Sizes of the tier, in blocks of 512 tokens, comma-separated.")
    ] = "1000,3000,10000,30000",
    policies: Annotated[
        str, typer.Option(help="Eviction policies, comma-separated.")
    ] = "lru,arc,turns",
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Replay a public trace on a host tier: how much does each eviction policy keep?"""
    from disagg.bench.router import evictions as bench

    names = [name for name in policies.split(",") if name]
    plan = bench.EvictionsPlan(trace, _numbers(blocks), names)
    raise typer.Exit(bench.run(plan, Output(json, results, writer(html))))


@app.command()
def router_faults(
    requests: Annotated[
        int, typer.Option(min=1, help="There are 380 combinations of faults.")
    ] = 10_000,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the order and of all random choices.")] = 1,
    first_token: options.FirstToken = "decode",
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Run the router in front of failing engines: each answer is right or one error, in time."""
    from disagg.chaos import router_faults as bench

    raise typer.Exit(
        bench.run(requests, clients, seed, first_token, Output(json, results, writer(html)))
    )


@app.command()
def faults(
    connectors: Annotated[
        str, typer.Option(help="Names, comma-separated. Default: all that run here.")
    ] = "",
    only: Annotated[
        str, typer.Option(help="Parts of the names of faults, comma-separated. Default: all.")
    ] = "",
    times: Annotated[int, typer.Option(min=1, help="Requests of each kind, at least.")] = 6,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Play again what an earlier run has played.")
    ] = False,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """What handoff connectors do when something goes wrong: ours and others, on equal engines."""
    from disagg.chaos.faults import run as bench

    names, kinds = ([part for part in text.split(",") if part] for text in (connectors, only))
    output = Output(json, results, writer(html))
    raise typer.Exit(bench.run(names, kinds, times, fresh=fresh, output=output))


@app.command()
def serve(
    rates: Annotated[
        str, typer.Option(help="Requests per second, comma-separated.")
    ] = "0.5,1,1.5,2",
    duration: Annotated[float, typer.Option(help="Seconds of load at each rate.")] = 24,
    mix: Annotated[
        str, typer.Option(help="SHARE:PROMPT:OUTPUT with lengths in tokens, comma-separated.")
    ] = "0.5:128:64,0.5:1500:64",
    repeat_share: Annotated[
        float, typer.Option(help="Share of the requests that repeat an earlier prompt.")
    ] = 0,
    ttft_target: Annotated[float, typer.Option(help="Target: seconds to the first token.")] = 2,
    itl_target: Annotated[float, typer.Option(help="Target: seconds between tokens.")] = 0.1,
    ways: Annotated[
        str,
        typer.Option(
            help="colocated, colocated-affinity, colocated-knows, apart, apart-affinity, "
            "apart-knows, apart-shares, apart-all, apart-whole, colocated-vllm-router, "
            "apart-vllm-router, colocated-ray-serve; comma-separated. Empty: write traces only."
        ),
    ] = "colocated,apart",
    pairs: Annotated[
        int, typer.Option(help="Engines of each role; colocated there are as many engines.")
    ] = 1,
    conversations: Annotated[
        int,
        typer.Option(
            help="Instead of --mix: so many conversations; --rates is how many begin per second."
        ),
    ] = 0,
    turns: Annotated[int, typer.Option(help="Requests of a conversation.")] = 10,
    think_s: Annotated[
        float, typer.Option(help="Mean seconds from an answer to the next request.")
    ] = 2.0,
    shared_prompts: Annotated[
        int, typer.Option(help="Different system prompts that conversations begin with.")
    ] = 2,
    shared_tokens: Annotated[int, typer.Option(help="Tokens of each of them.")] = 1024,
    turn_tokens: Annotated[int, typer.Option(help="Tokens that the user says in a turn.")] = 64,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 32,
    local_prefill_tokens: options.LocalPrefillTokens = 256,
    prefill_wait_share: options.PrefillWaitShare = None,
    first_token: options.FirstToken = "decode",
    first_token_hold_s: options.FirstTokenHoldS = 0.0,
    batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="vLLM's max_num_batched_tokens of all engines.")
    ] = None,
    decode_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="The same for the decode engine only.")
    ] = None,
    prefill_seqs: Annotated[
        int | None, typer.Option(min=1, help="vLLM's max_num_seqs of the prefill engine.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, request kinds and prompts.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this file; --rates and --mix are ignored.")
    ] = None,
    write_trace: Annotated[
        Path | None, typer.Option(help="Write the load to this file; one file for each rate.")
    ] = None,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Serve one load by plain engines, and by as many prefill and decode engines."""
    from disagg.bench.serve import run as bench
    from disagg.bench.serve.conversations import Talk
    from disagg.bench.serve.plan import ServePlan
    from disagg.bench.serve.score import Targets
    from disagg.bench.serve.trace import parse_mix

    talk = None
    if conversations:
        talk = Talk(
            conversations=conversations,
            turns=turns,
            think_s=think_s,
            shared_prompts=shared_prompts,
            shared_tokens=shared_tokens,
            turn_tokens=turn_tokens,
            answer_tokens=answer_tokens,
        )
    plan = ServePlan(
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
        pairs=pairs,
        talk=talk,
    )
    raise typer.Exit(bench.run(plan, Output(json, results, writer(html))))


@app.command(
    "vllm",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def vllm_load(ctx: typer.Context) -> None:
    """Load a deployment by `vllm bench serve`, with vLLM's options; --help lists them."""
    from disagg.testing import vllm_bench

    vllm_bench.run(ctx.args)


@app.command()
def transfer(
    transports: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated. Default: {ON_CPU}; on GPUs cuda_ipc,nccl,tcp,shared_storage."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="MB per fetch, comma-separated. Default: 33,131,262; on GPUs 131,1074,8590."
        ),
    ] = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes per block and layer, comma-separated. "
            "Default: 65536,1048576; on GPUs 65536."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Default: 8; on GPUs 32.")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Fetches at once, as far as their sum fits the largest size. "
            "Default: 1,4; on GPUs 1."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Memory of the caches: cpu or cuda.")] = "cpu",
    staging_mb: Annotated[
        int, typer.Option(min=1, help="MiB of GPU memory that each end stages in.")
    ] = 64,
    storage_checksum: Annotated[
        str, typer.Option(help="Of the files of shared_storage: keyed or fast.")
    ] = "keyed",
    repeats: Annotated[
        int, typer.Option(min=1, help="Repeats, medians count; one more warms up.")
    ] = 5,
    peer: Annotated[bool, typer.Option(help="Also measure NIXL over UCX.")] = True,
    json: Json = None,
    results: Results = None,
    html: Html = None,
) -> None:
    """Measure whole fetches over each transport, their upper bounds and NIXL. No engine, no Ray."""
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
        checksum=storage_checksum,
    )
    raise typer.Exit(bench.run(plan, with_peer=peer, output=Output(json, results, writer(html))))


@app.command()
def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT...", help="Results files; several stand side by side."),
    ],
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")],
) -> None:
    """Write a page with tables and charts from results files."""
    from disagg.bench.html import save

    save([load(path) for path in files], html)


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="What `vllm bench serve --save-result` or GuideLLM wrote."
        ),
    ],
    results: Results = None,
    html: Html = None,
) -> None:
    """Read a result of vLLM's own benchmark or of GuideLLM, for the same tables and charts as
    ours."""
    from disagg.bench import imported

    if results is None and html is None:
        raise ConfigError("--html or --results: name what to write")
    raise typer.Exit(imported.run(file, results, writer(html), sys.argv))


@app.command()
def pages(
    pages: Annotated[Path, typer.Option(help="Folder of the benchmark pages.")] = Path(
        "docs/benchmarks"
    ),
    results: Annotated[Path, typer.Option(help="Folder of the results files.")] = Path(
        "benchmarks/results"
    ),
    picture: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture of the newest serve and handoff.")
    ] = Path("docs/images/at-a-glance.svg"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a page is out of date.")
    ] = False,
) -> None:
    """Write the newest results of each command into the pages and the picture of a checkout."""
    from disagg.bench import pages as bench

    raise typer.Exit(bench.run(pages, results, picture, check=check))


def _transports(text: str) -> list[TransportName]:
    wanted = text.split(",")
    known = [name for name in TRANSPORTS if name in wanted]
    if strange := sorted(set(wanted) - set(known)):
        raise ConfigError(
            f"{', '.join(strange)}: no such transport; choose from {', '.join(TRANSPORTS)}"
        )
    return sorted(known, key=wanted.index)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"{text!r}: must be whole numbers, comma-separated") from None


def _rates(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--rates: {text!r} — must be numbers, comma-separated") from None
