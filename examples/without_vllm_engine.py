"""Our connector without vLLM's engine: one handoff between two workers, in GB/s.

Producer and consumer are two processes, each with a cache and no model. The messages of the
scheduler halves are written by hand; everything else is what runs in an engine.

    .venv/bin/python examples/without_vllm_engine.py --mib 256 --transport process_memory
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.utils import allocate_kv_cache
from xxhash import xxh3_128_hexdigest

from disagg.connector.handoff.connector import DisaggConnector
from disagg.connector.handoff.messages import (
    Grant,
    HandoffLoad,
    StepReport,
    StepWork,
    WorkerAddress,
)
from disagg.connector.model_runner import Lifecycle
from disagg.testing.checkpoint import make_model
from disagg.vllm_compat.kv_cache import config_of_groups

TOKENS, LAYERS = 128, 8
BLOCK_BYTES = 4 << 20


def worker(folder: Path, role: str, options: argparse.Namespace, pipe: Connection) -> None:
    """One worker rank: its lifecycle, and a cache of random bytes or zeros."""
    config = EngineArgs(
        model=str(folder / "model"),
        dtype="bfloat16",
        block_size=TOKENS,
        max_model_len=TOKENS,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DisaggConnector",
            kv_connector_module_path="disagg.connector",
            kv_role="kv_producer" if role == "kv_producer" else "kv_consumer",
            kv_connector_extra_config={
                "transports": [options.transport],
                "storage_path": str(folder / "storage"),
                "storage_max_bytes": 8 << 30,
            },
        ),
    ).create_engine_config()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder / role}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    blocks = max(1, (options.mib << 20) // BLOCK_BYTES)
    head = BLOCK_BYTES // LAYERS // TOKENS // 8 // 2 // 2  # 8 heads, K and V, two bytes each
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=8, head_size=head, dtype=torch.bfloat16
    )
    group = KVCacheGroupSpec([f"layer.{i}" for i in range(LAYERS)], spec)
    config.cache_config.kv_cache_layout = "LBHNC"
    cache = config_of_groups(config, [group], blocks * BLOCK_BYTES)
    caches = allocate_kv_cache(
        cache, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout()
    )
    lifecycle = Lifecycle(DisaggConnector(config, KVConnectorRole.WORKER, cache), config)
    address = lifecycle.register(caches)
    if role == "kv_producer":
        for layer in caches.values():
            layer.view(torch.int8).random_(-128, 128)
        produce(lifecycle, address, blocks, options.times, pipe)
    else:
        consume(lifecycle, blocks, options.times, pipe)
    pipe.send(
        [xxh3_128_hexdigest(layer.view(torch.int8).numpy().data) for layer in caches.values()]
    )
    pipe.recv()
    lifecycle.shutdown()


def step(lifecycle: Lifecycle, work: StepWork) -> KVConnectorOutput:
    """A step without a forward pass, in which this is to be done."""
    scheduled = SchedulerOutput.make_empty()
    scheduled.kv_connector_metadata = work
    return lifecycle.idle_step(scheduled)


def produce(
    lifecycle: Lifecycle, address: object, blocks: int, times: int, pipe: Connection
) -> None:
    """Keep all blocks under one lease per handoff, until each was fetched."""
    assert isinstance(address, WorkerAddress)
    leases = [Grant(lease, f"request-{lease}", list(range(blocks)), 60.0) for lease in range(times)]
    step(lifecycle, StepWork(grants=leases))
    pipe.send(address)
    left = {lease.request_id for lease in leases}
    while left:
        left -= step(lifecycle, StepWork()).finished_sending or set()
        time.sleep(0.01)


def consume(lifecycle: Lifecycle, blocks: int, times: int, pipe: Connection) -> None:
    """Fetch them all, each time into the same blocks."""
    there = pipe.recv()
    one_stage = [there.regions]  # of a pipeline, here and there
    for lease in range(times):
        load = HandoffLoad(
            f"request-{lease}",
            lease,
            [there.endpoint],
            (one_stage, one_stage),
            TOKENS,
            ((0, blocks),),
            0,
            list(range(blocks)),
        )
        began, work = time.perf_counter(), StepWork(loads=[load])
        while not (output := step(lifecycle, work)).finished_recving:
            work = StepWork()
            time.sleep(0.0005)
        seconds = time.perf_counter() - began
        report = output.kv_connector_worker_meta
        assert isinstance(report, StepReport)
        (loaded,) = report.loads
        print(
            f"{loaded.outcome} by {loaded.transport}: {loaded.num_bytes >> 20} MiB in "
            f"{seconds * 1e3:.0f} ms, {loaded.num_bytes / seconds / 1e9:.2f} GB/s"
        )


def main() -> None:
    """Two workers, a few handoffs, and whether the bytes are the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--times", type=int, default=4, help="the first also connects")
    parser.add_argument("--transport", default="process_memory")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", dtype="bfloat16")
        (folder / "storage").mkdir(mode=0o700)
        pipes, workers = [], []
        for role in ("kv_producer", "kv_consumer"):
            ours, theirs = start.Pipe()
            one = start.Process(target=worker, args=(folder, role, options, theirs), daemon=True)
            one.start()
            pipes.append(ours)
            workers.append(one)
        producer, consumer = pipes
        consumer.send(producer.recv())
        same = producer.recv() == consumer.recv()
        for pipe in pipes:
            pipe.send("end")
        for one in workers:
            one.join(20)
    sys.exit(None if same else "these are NOT the same bytes")


if __name__ == "__main__":
    main()
