"""`disagg bench handoff`: the cost of a handoff for the decode engine's first token.

All engines live for the whole run. Each repeat measures every way with a fresh prompt, so that
drift of the machine affects all alike. Engines that are not being measured are stopped. On a CPU
the model's KV is 32 KiB per token (4 layers, 8 KV heads of 128, float32, which every CPU computes
fast); on GPUs it is that of an 8B model, 144 KiB (36 layers, bfloat16), with weights of 4B, so that
four engines find room on one GPU. Times of the decode leg run from its request to its first token,
times of the prefill leg from request to answer.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from disagg.bench.first_token.memcpy import allowed_ms, memcpy_speed
from disagg.bench.first_token.pairs import SHOWN, Pair, example, nixl, ours, random_prompt
from disagg.bench.results import Output, Target, target
from disagg.bench.results import Row as ResultRow
from disagg.bench.results import Table as ResultTable
from disagg.bench.transfer import gpus
from disagg.errors import ConfigError, StartupError
from disagg.tables import show as show_table
from disagg.testing.checkpoint import make_model
from disagg.testing.openai_stream import stream
from disagg.testing.ports import free_port
from disagg.testing.vllm_server import VllmServer, completion
from disagg.transport.names import TransportName

MODEL = Path(".cache/models/kv32k-float32")
KV_BYTES_PER_TOKEN = 32 << 10
# Prompts in one chunk: ExampleConnector stores only a part of a chunked one, and its reader dies.
_ARGS = ("--max-num-batched-tokens", "16384")
_SHORT = (64, 256)  # not in the table: for the threshold from which handoffs are faster
# Targets: prefill leg over a plain request, and the first handoff between two engines.
_PREFILL_AIM, _FIRST_AIM_MS = 1.03, 100.0
Samples = dict[tuple[int, str], list[float]]
Row = dict[str, float]


@dataclass(frozen=True)
class Hardware:
    """What the engines run on, and the model that suits it. command: of the results. transport:
    disagg's usual one there. shape: `make_model`'s parameters. envs: of the prefill and of the
    decode engine."""

    command: str
    transport: TransportName
    model: Path
    shape: dict[str, Any]
    kv_bytes_per_token: int
    dtype: str
    args: tuple[str, ...]
    shown: str
    envs: tuple[dict[str, str], dict[str, str]] = ({}, {})
    nixl_buffers: str = "cpu"
    # UCX's default transports do not start everywhere.
    ucx_tls: str = "sm,self,tcp"


def on_cpu() -> Hardware:
    """Engines that share this machine's processor."""
    shape = {"layers": 4, "hidden": 256, "kv_heads": 8, "head_dim": 128}
    return Hardware(
        "handoff",
        "process_memory",
        MODEL,
        shape,
        KV_BYTES_PER_TOKEN,
        "float32",
        _ARGS,
        "float32, CPU",
    )


def on_gpus() -> Hardware:
    """The prefill engines on the first GPU and the decode engines on the second, or all on the only
    one."""
    gpus.require()
    places = gpus.choose("cuda")
    envs = [
        {**place.env, "CUDA_VISIBLE_DEVICES": place.device.removeprefix("cuda:")}
        for place in (places.producer, places.consumer)
    ]
    shape = {"layers": 36, "hidden": 3072, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    room = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(4 << 30))
    return Hardware(
        "handoff-cuda",
        "cuda_ipc",
        Path(".cache/models/kv144k-bfloat16-no-weights"),
        {**shape, "weights": False},
        144 << 10,
        "bfloat16",
        (*_ARGS, *room, "--load-format", "dummy", "--max-num-seqs", "16"),
        "bfloat16, GPU",
        (envs[0], envs[1]),
        "cuda",
        "cuda_ipc,cuda_copy,sm,self,tcp",
    )


_HARDWARE = {"cpu": on_cpu, "cuda": on_gpus}


def run(
    lengths: Sequence[int],
    repeats: int,
    storage: Path,
    *,
    device: str,
    transport: TransportName | None,
    peers: Sequence[str],
    output: Output,
) -> int:
    """Measure and print. transport: None for the usual one there. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    if device not in _HARDWARE:
        raise ConfigError(f"--device: {device} — one of {', '.join(_HARDWARE)}")
    hardware = _HARDWARE[device]()
    transport = transport or hardware.transport
    make_model(hardware.model, **hardware.shape)
    with ExitStack() as stack:
        own = tempfile.TemporaryDirectory(prefix="disagg-bench-", dir=storage)
        folder = Path(stack.enter_context(own))
        pairs = [ours(transport, folder), *(_PEERS[name](folder, hardware) for name in peers)]
        servers = _start(stack, pairs, hardware, console)
        samples = _measure(pairs, servers, [*_SHORT, *lengths], repeats, folder, console)
        memory = {name: _memory(server) for name, server in servers.items()}
    names = [pair.name for pair in pairs[1:]]
    memcpy = memcpy_speed()
    rows = _report(samples, lengths, names, memcpy, hardware.kv_bytes_per_token)
    meetings = {
        way: round(statistics.median(seconds) * 1000, 1)
        for (length, way), seconds in samples.items()
        if length == 0
    }
    for name, sizes in memory.items():
        console.print(f"{name}: {sizes}")
    show_table(_table(rows, names, f"{hardware.shown}; disagg (ours) over {transport}"))
    threshold = _threshold(samples, [*_SHORT, *lengths])
    console.print(
        f"up to about {threshold} tokens decode computes a prompt as fast as a handoff takes; "
        "use it for router.pairing.local_prefill_tokens"
    )
    figures = {"rows": rows, "first_ms": meetings, "memory": memory, "memcpy_gb_s": memcpy / 1e9}
    variant = "" if transport == hardware.transport else f"-{transport}"
    output.write(
        hardware.command + variant,
        {**figures, "local_prefill_tokens": threshold},
        _tables(rows, meetings, ["ours", *names]),
        _targets(rows, meetings, names),
    )
    return 0


def _threshold(samples: Samples, lengths: Sequence[int]) -> int:
    """Tokens at which linear fits of the handoff times and the computing times cross."""
    slopes, heights = zip(
        *(
            statistics.linear_regression(
                lengths, [statistics.median(samples[length, way]) for length in lengths]
            )
            for way in ("ours", "local")
        ),
        strict=True,
    )
    if slopes[1] <= slopes[0]:
        return max(lengths)  # never worth it here
    crossing: float = (heights[0] - heights[1]) / (slopes[1] - slopes[0])
    return max(0, round(crossing))


def _nixl(folder: Path, hardware: Hardware) -> Pair:
    return nixl(hardware.nixl_buffers, hardware.ucx_tls)


_PEERS: dict[str, Callable[[Path, Hardware], Pair]] = {
    "example": lambda folder, hardware: example(folder),
    "nixl": _nixl,
}


def _start(
    stack: ExitStack, pairs: Sequence[Pair], hardware: Hardware, console: Console
) -> dict[str, VllmServer]:
    servers = {}
    began = time.monotonic()
    for pair in pairs:
        sides = zip(("prefill", "decode"), pair.roles, hardware.envs, strict=True)
        for side, role, place in sides:
            name = f"{pair.name} {side}"
            env = {"VLLM_CPU_KVCACHE_SPACE": "1", **place, **pair.env}
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            config = {**pair.config, "kv_role": role}
            model, args, dtype = hardware.model.absolute(), hardware.args, hardware.dtype
            server = VllmServer(name, model, None, config, args, dtype, env)
            servers[name] = stack.enter_context(server)
    console.print(f"starting {len(servers)} engines, which takes minutes on few cores")
    for name, server in servers.items():
        server.wait_ready()
        console.print(f"{name} ready after {time.monotonic() - began:.0f} s")
    return servers


def _measure(
    pairs: Sequence[Pair],
    servers: dict[str, VllmServer],
    lengths: Sequence[int],
    repeats: int,
    folder: Path,
    console: Console,
) -> Samples:
    generator = random.Random(1)
    samples: Samples = defaultdict(list)
    for name, server in servers.items():
        server.complete(
            random_prompt(generator, 300)
        )  # the first pass of an engine includes its set-up
        if len(pairs) > 1:
            server.pause()  # peers poll, and would take the cores
            console.print(f"{name} is warm")
    _first_meeting(pairs, servers, generator, samples, console)
    for length in lengths:
        for number in range(repeats + 1):
            taken: dict[str, float] = {}
            for pair in pairs:
                with _awake(servers, pair, alone=len(pairs) == 1):
                    taken |= _one_round(pair, servers, generator, length)
            if number:  # the first round warms connections and pages
                for way, seconds in taken.items():
                    samples[length, way].append(seconds)
            console.print(
                f"{length} tokens, {number}/{repeats}: "
                + ", ".join(f"{way} {seconds * 1000:.0f} ms" for way, seconds in taken.items())
            )
            for file in (folder / "example").glob("*/*"):
                file.unlink()  # ExampleConnector never removes its files, and /dev/shm is memory
    return samples


def _first_meeting(
    pairs: Sequence[Pair],
    servers: dict[str, VllmServer],
    generator: random.Random,
    samples: Samples,
    console: Console,
) -> None:
    """The first handoff between two warm engines, and the three after it."""
    for pair in pairs:
        with _awake(servers, pair, alone=len(pairs) == 1):
            taken = [_one_round(pair, servers, generator, 300)[pair.name] for _ in range(4)]
        samples[0, f"{pair.name} first"] = taken[:1]
        samples[0, f"{pair.name} later"] = taken[1:]
        shown = ", ".join(f"{seconds * 1000:.0f}" for seconds in taken)
        console.print(f"{pair.name}: first handoffs, 300 tokens: {shown} ms")


@contextmanager
def _awake(servers: dict[str, VllmServer], pair: Pair, *, alone: bool) -> Iterator[None]:
    mine = [] if alone else [servers[f"{pair.name} {side}"] for side in ("prefill", "decode")]
    for server in mine:
        server.resume()
    yield
    for server in mine:
        server.pause()


def _one_round(
    pair: Pair, servers: dict[str, VllmServer], generator: random.Random, length: int
) -> dict[str, float]:
    """Seconds by way. NAME: first token after the handoff. NAME prefill: the prefill leg. NAME
    floor: the same prompt from decode's prefix cache. local: another prompt, computed by decode."""
    prefill, decode = servers[f"{pair.name} prefill"], servers[f"{pair.name} decode"]
    prompt = random_prompt(generator, length)
    extra = {}
    began = time.monotonic()
    if pair.hands_params:
        extra = {"kv_transfer_params": prefill.prefill(prompt)}
    else:
        prefill.complete(prompt, max_tokens=1)
    taken = {f"{pair.name} prefill": time.monotonic() - began}
    taken[pair.name] = _first_token(decode, prompt, **extra)
    taken[f"{pair.name} floor"] = _first_token(decode, prompt)
    if pair.name == "ours":
        taken["local"] = _first_token(decode, random_prompt(generator, length))
        taken["prefill alone"] = _without_connector(prefill, random_prompt(generator, length))
    return taken


def _without_connector(server: VllmServer, prompt: list[int]) -> float:
    """The prefill engine's answer to a prompt that is not handed off."""
    began = time.monotonic()
    server.complete(prompt, max_tokens=1)
    return time.monotonic() - began


def _first_token(server: VllmServer, prompt: list[int], **extra: Any) -> float:
    body = {"model": "tiny", **completion(prompt, max_tokens=2, stream=True), **extra}
    began, first = time.monotonic(), 0.0
    try:
        for event in stream(f"{server.url}/v1/completions", body):
            if event.get("choices") and not first:
                first = time.monotonic() - began
    except RuntimeError as error:
        raise StartupError(f"{server.name}: {error}", server.tail()) from error
    return first


def _memory(server: VllmServer) -> str:
    assert server.process is not None
    root = psutil.Process(server.process.pid)
    sizes = [p.memory_info().rss / 2**20 for p in [root, *root.children(recursive=True)]]
    return " + ".join(f"{size:.0f}" for size in sizes if size > 50) + " MiB resident"


def _report(
    samples: Samples,
    lengths: Sequence[int],
    peers: Sequence[str],
    memcpy: float,
    kv_bytes_per_token: int,
) -> list[Row]:
    rows = []
    for length in lengths:
        median = {way: statistics.median(s) for (at, way), s in samples.items() if at == length}
        row: Row = {f"{way} ms": round(seconds * 1000, 1) for way, seconds in median.items()}
        row |= {"tokens": length, "MB": round(length * kv_bytes_per_token / 1e6, 1)}
        row["excess ms"] = round((median["ours"] - median["ours floor"]) * 1000, 1)
        row["allowed ms"] = allowed_ms(length * kv_bytes_per_token, memcpy)
        row["ours/local"] = round(median["ours"] / median["local"], 3)
        row["prefill/alone"] = round(median["ours prefill"] / median["prefill alone"], 3)
        for peer in peers:
            row[f"ours/{peer}"] = round(median["ours"] / median[peer], 3)
        rows.append(row)
    return rows


def _tables(
    rows: Sequence[Row], meetings: dict[str, float], names: Sequence[str]
) -> list[ResultTable]:
    """First tokens by length, then the first handoffs between two engines."""
    found: list[ResultRow] = []
    for row in rows:
        shown: ResultRow = {"tokens": int(row["tokens"]), "MB": row["MB"]}
        shown |= {"prefix cache": row["ours floor ms"], "disagg": row["ours ms"]}
        shown |= {"excess": row["excess ms"], "allowed excess": row["allowed ms"]}
        for peer in names[1:]:
            shown |= {
                SHOWN[peer]: row[f"{peer} ms"],
                f"ratio to {SHOWN[peer]}": row[f"ours/{peer}"],
            }
        shown |= {"computed by decode": row["local ms"], "prefill leg": row["ours prefill ms"]}
        found.append(shown | {"prefill leg, ratio to plain": row["prefill/alone"]})
    first: list[ResultRow] = [
        {
            "connector": SHOWN[name],
            "first": meetings[f"{name} first"],
            "later, median": meetings[f"{name} later"],
        }
        for name in names
    ]
    return [
        ResultTable("First token of decode, median ms", found),
        ResultTable("First token of the first handoff between two engines (300 tokens), ms", first),
    ]


def _targets(
    rows: Sequence[Row], meetings: dict[str, float], peers: Sequence[str]
) -> list[Target | None]:
    found: list[Target | None] = []
    for row in rows:
        at = f"{row['tokens']:,.0f} tokens"
        for peer in peers:
            name = f"first token, ratio to {SHOWN[peer]}"
            found.append(target(name, row[f"ours/{peer}"], at=at, at_most=1.0))
        excess, allowed = row["excess ms"], row["allowed ms"]
        found.append(target("excess over prefix cache, ms", excess, at=at, at_most=allowed))
        name = "prefill leg, ratio to a plain request"
        found.append(target(name, row["prefill/alone"], at=at, at_most=_PREFILL_AIM))
    more = round(meetings["ours first"] - meetings["ours later"], 1)
    name = "first handoff between two engines, ms more than later ones"
    return [*found, target(name, more, at_most=_FIRST_AIM_MS)]


def _table(rows: Sequence[Row], peers: Sequence[str], shown: str) -> Table:
    table = Table(title=f"First token of decode, median ms ({shown})")
    columns = ["tokens", "MB", "ours floor ms", "ours ms", "excess ms", "allowed ms", "local ms"]
    columns.append("ours/local")
    for peer in peers:
        columns += [f"{peer} floor ms", f"{peer} ms", f"ours/{peer}"]
    columns += ["ours prefill ms", "prefill/alone"]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{row[column]:g}" for column in columns))
    return table
