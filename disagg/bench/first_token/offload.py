"""`disagg bench offload`: the cost of a prompt in a tier, and the cost of storing it.

Each repeat runs a fresh prompt of every length through one engine: computed, from the engine's
prefix cache, from host memory, from files. The model's KV is 32 KiB per token (4 layers, 8 KV heads
of 128, float32). Times run from the request to its first token. A second engine without tiers
shows what a running decode loses to storing: both stream an answer while prompts are stored.
vLLM's own connectors are measured too, if they start.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disagg.bench.first_token.handoff import KV_BYTES_PER_TOKEN, MODEL
from disagg.bench.first_token.memcpy import allowed_ms, memcpy_speed
from disagg.bench.results import Output, Target, target
from disagg.bench.results import Row as ResultRow
from disagg.bench.results import Table as ResultTable
from disagg.errors import ConfigError, StartupError
from disagg.tables import show as show_table
from disagg.testing.checkpoint import make_model
from disagg.testing.openai_stream import stream
from disagg.testing.vllm_server import VllmServer, completion

OURS, PLAIN = "ours", "plain"
_DECODE_AIM = 1.03  # target: time per token of a decode, over that without tiers
_BLOCK = 128
_STORED_S = 20.0
_DECODE_TOKENS = 192
_STEPS = 4
# Per repeat, because two engines of one kind differ by some percent in a pair.
_PAIRS = 4
_BESIDE = 1000  # tokens of the prompts that are computed and stored beside a decode
Samples = dict[tuple[int, str], list[float]]


@dataclass(frozen=True)
class _Way:
    """An engine. `has_files`: it has a file tier below host memory."""

    name: str
    config: dict[str, Any] | None
    has_files: bool = False


def run(
    lengths: Sequence[int],
    repeats: int,
    storage: Path,
    *,
    host_bytes: int,
    peers: Sequence[str],
    output: Output,
) -> int:
    """Measure and print. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    make_model(MODEL, layers=4, hidden=256, kv_heads=8, head_dim=128)
    if strange := sorted(set(peers) - set(_PEERS)):
        raise ConfigError(
            f"--peers: {', '.join(strange)} — unknown peer; choose from {', '.join(_PEERS)}"
        )
    with ExitStack() as stack:
        own = tempfile.TemporaryDirectory(prefix="disagg-bench-", dir=storage)
        folder = Path(stack.enter_context(own))
        ways = [_ours(folder, host_bytes), _Way(PLAIN, None)]
        ways += [_PEERS[name](host_bytes) for name in peers]
        servers = _start(stack, ways, console)
        samples = _first_tokens([w for w in ways if w.name in servers], servers, lengths, repeats)
        decode = _decoding(servers, repeats * _PAIRS)
    memcpy = memcpy_speed()
    rows = [_row(samples, length, memcpy) for length in lengths]
    names = [name for name in servers if name not in (OURS, PLAIN)]
    show_table(_table(rows, names, memcpy))
    slower = statistics.median(a / b for a, b in zip(decode[OURS], decode[PLAIN], strict=True))
    console.print(
        f"Time per token of a decode while prompts are stored: {slower:.3f} times that without "
        f"tiers (median of {len(decode[OURS])} pairs; target: at most {_DECODE_AIM})"
    )
    figures = {"rows": rows, "memcpy_gb_s": memcpy / 1e9, "decode": decode, "slower": slower}
    output.write("offload", figures, _tables(rows, names), _targets(rows, slower))
    return 0


# ---- engines -------------------------------------------------------------------------------


def _ours(folder: Path, host_bytes: int) -> _Way:
    extra: dict[str, object] = {"host_bytes": host_bytes, "directory": str(folder / "tier")}
    extra["reset_keeps_files"] = True
    config = {
        "kv_connector": "DisaggOffloadConnector",
        "kv_connector_module_path": "disagg.connector.offload",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return _Way(OURS, config, has_files=True)


def _offloading(host_bytes: int) -> _Way:
    extra = {"cpu_bytes_to_use": host_bytes, "block_size": _BLOCK}
    return _Way("offloading", _vllms("OffloadingConnector", extra))


def _simple(host_bytes: int) -> _Way:
    return _Way("simple", _vllms("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": host_bytes}))


def _vllms(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


_PEERS: dict[str, Callable[[int], _Way]] = {"offloading": _offloading, "simple": _simple}


def _start(stack: ExitStack, ways: Sequence[_Way], console: Console) -> dict[str, VllmServer]:
    """The engines that start. disagg's and the plain one must."""
    console.print(f"starting {len(ways)} engines, which takes minutes on few cores")
    began, servers = time.monotonic(), {}
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    launched = [
        (
            way,
            stack.enter_context(VllmServer(way.name, MODEL.absolute(), None, way.config, env=env)),
        )
        for way in ways
    ]
    for way, server in launched:
        try:
            server.wait_ready()
            server.complete(_prompt(random.Random(0), 300))
        except (StartupError, RuntimeError, OSError) as error:
            if way.name in (OURS, PLAIN):
                raise
            console.print(f"{way.name}: left out, it does not start: {_cause(server, error)}")
            continue
        console.print(f"{way.name} ready after {time.monotonic() - began:.0f} s")
        server.pause()
        servers[way.name] = server
    return servers


def _cause(server: VllmServer, error: Exception) -> str:
    lines = [line for line in server.tail(200).splitlines() if "Error" in line]
    return lines[-1].strip() if lines else str(error)


# ---- measuring -----------------------------------------------------------------------------


def _first_tokens(
    ways: Sequence[_Way], servers: dict[str, VllmServer], lengths: Sequence[int], repeats: int
) -> Samples:
    console, generator = Console(highlight=False, soft_wrap=True), random.Random(1)
    samples: Samples = defaultdict(list)
    for length in lengths:
        for number in range(repeats + 1):
            for way in ways:
                if way.name == PLAIN:
                    continue
                server = servers[way.name]
                server.resume()
                taken = _one_prompt(way, server, _prompt(generator, length))
                server.pause()
                if number:  # the first round warms pages
                    for source, seconds in taken.items():
                        samples[length, f"{way.name} {source}"].append(seconds)
                shown = ", ".join(f"{s} {t * 1000:.0f} ms" for s, t in taken.items())
                console.print(f"{length} tokens, {number}/{repeats}, {way.name}: {shown}")
    return samples


def _one_prompt(way: _Way, server: VllmServer, prompt: list[int]) -> dict[str, float]:
    stored = len(prompt) // _BLOCK * _BLOCK * KV_BYTES_PER_TOKEN
    before = _written(server)
    taken = {"computed": _first_token(server, prompt)}
    if way.has_files:  # writes would take the cores of the next request
        _until(lambda: _written(server) - before >= stored)
    else:
        time.sleep(1)
    taken["own cache"] = _first_token(server, prompt)
    server.post("/reset_prefix_cache", {}).raise_for_status()
    taken["host"] = _first_token(server, prompt)
    if way.has_files:
        server.post("/reset_prefix_cache?reset_external=true", {}).raise_for_status()
        taken["files"] = _first_token(server, prompt)
    return taken


def _written(server: VllmServer) -> float:
    name = "vllm:kv_offload_total_bytes_total"
    return server.metric(name, transfer_type="CPU_to_STORAGE")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _STORED_S
    while not condition():
        if time.monotonic() > deadline:
            raise StartupError(f"the prompt was not stored within {_STORED_S:g} s")
        time.sleep(0.05)


def _first_token(server: VllmServer, prompt: list[int]) -> float:
    body = {"model": "tiny", **completion(prompt, max_tokens=2, stream=True)}
    began, first = time.monotonic(), 0.0
    for event in stream(f"{server.url}/v1/completions", body):
        if event.get("choices") and not first:
            first = time.monotonic() - began
    return first


def _decoding(servers: dict[str, VllmServer], pairs: int) -> dict[str, list[float]]:
    """Seconds per token of a streamed answer while other prompts are computed, engines in turns."""
    generator, taken = random.Random(2), defaultdict[str, list[float]](list)
    for number in range(pairs + 1):
        asked = _prompt(generator, 300)
        others = [_prompt(generator, _BESIDE) for _ in range(_STEPS)]
        for name in (OURS, PLAIN) if number % 2 else (PLAIN, OURS):
            server = servers[name]
            server.resume()
            seconds = _token_time(server, asked, others)
            server.pause()
            if number:
                taken[name].append(seconds)
    return dict(taken)


def _token_time(server: VllmServer, asked: list[int], others: Sequence[list[int]]) -> float:
    def prompts() -> None:
        for prompt in others:
            server.complete(prompt, max_tokens=1)

    body = {"model": "tiny", **completion(asked, max_tokens=_DECODE_TOKENS, stream=True)}
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(prompts)
        began = time.monotonic()
        count = sum(1 for _ in stream(f"{server.url}/v1/completions", body))
        seconds = time.monotonic() - began
        done.result()
    return seconds / count


def _prompt(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(300, 1000) for _ in range(length)]


# ---- report --------------------------------------------------------------------------------


def _row(samples: Samples, length: int, memcpy: float) -> dict[str, float]:
    median = {way: statistics.median(s) * 1000 for (at, way), s in samples.items() if at == length}
    size = length * KV_BYTES_PER_TOKEN
    row = {f"{way} ms": round(value, 1) for way, value in median.items()}
    row |= {"tokens": length, "MB": round(size / 1e6, 1)}
    row["excess ms"] = round(median[f"{OURS} host"] - median[f"{OURS} own cache"], 1)
    row["aim ms"] = allowed_ms(size, memcpy)
    row["host/computed"] = round(median[f"{OURS} host"] / median[f"{OURS} computed"], 3)
    return row


def _tables(rows: Sequence[dict[str, float]], peers: Sequence[str]) -> list[ResultTable]:
    found: list[ResultRow] = []
    for row in rows:
        shown: ResultRow = {"tokens": int(row["tokens"]), "MB": row["MB"]}
        for source in ("computed", "own cache", "host", "files"):
            shown[source] = row[f"{OURS} {source} ms"]
        shown |= {"host's excess": row["excess ms"], "allowed excess": row["aim ms"]}
        for peer in peers:
            shown[f"{peer}, host"] = row[f"{peer} host ms"]
        found.append(shown)
    return [ResultTable("First token, median ms, by the place of the prompt's blocks", found)]


def _targets(rows: Sequence[dict[str, float]], slower: float) -> list[Target | None]:
    found = [
        target(
            "host's excess over the engine's own cache, ms",
            row["excess ms"],
            at=f"{row['tokens']:,.0f} tokens",
            at_most=row["aim ms"],
        )
        for row in rows
    ]
    name = "time per token of a decode while prompts are stored, ratio to no tiers"
    return [*found, target(name, round(slower, 4), at_most=_DECODE_AIM)]


def _table(rows: Sequence[dict[str, float]], peers: Sequence[str], memcpy: float) -> Table:
    table = Table(
        title="First token, median ms (float32, 32 KiB of KV per token, CPU); one thread's memcpy "
        f"{memcpy / 1e9:.1f} GB/s"
    )
    columns = ["tokens", "MB", *(f"{OURS} {s} ms" for s in ("computed", "own cache", "host"))]
    columns += ["excess ms", "aim ms", f"{OURS} files ms", "host/computed"]
    columns += [f"{peer} {source} ms" for peer in peers for source in ("own cache", "host")]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{row[column]:g}" for column in columns))
    return table
