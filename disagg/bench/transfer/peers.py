"""The pairs of processes with NIXL in `bench transfer`: one for each setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disagg.bench.transfer import nixl
from disagg.bench.transfer.memory import LAYERS
from disagg.bench.transfer.nixl import Setting
from disagg.bench.transfer.plan import Ids, TransferPlan
from disagg.bench.transfer.ways import READY_S, Pair, Way
from disagg.testing.child_process import Child, ChildError

# Starts a child: name, factory of its object, arguments; `env` as a keyword.
Start = Callable[..., Child]


def reason_against(plan: TransferPlan, *, shared: bool) -> str | None:
    """Why NIXL cannot be measured here; None if it can."""
    if not nixl.installed():
        return f"NIXL is not installed; {nixl.INSTALL}"
    if plan.layers % LAYERS:
        return f"NIXL is measured with multiples of {LAYERS} layers only"
    if not shared:
        return "NIXL is measured on one GPU only; set CUDA_VISIBLE_DEVICES=0"
    return None


def start(plan: TransferPlan, child: Start, tell: Callable[[str], None]) -> list[Way]:
    """A way for each setting that starts here; stopped while another way is measured."""
    ways: list[Way] = []
    # Progress threads take whole cores even when idle, so these pairs start last.
    settings = nixl.SETTINGS[plan.device]
    for progress in (False, True):
        chosen = [setting for setting in settings if setting.progress == progress]
        for some in [[setting] for setting in chosen] if progress else [chosen]:
            pairs = [_pair(plan, child, setting) for setting in some]
            for setting, pair in zip(some, pairs, strict=True):
                try:
                    ways.append(_meet(plan, setting, pair))
                except ChildError as error:
                    tell(f"{setting.label}: does not start here: {error}")
                    for one in pair:
                        one.end()
    return ways


def _pair(plan: TransferPlan, child: Start, setting: Setting) -> Pair:
    env = {"UCX_TLS": setting.tls, "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
    args: Any = (setting, plan.cache_bytes(), plan.device)
    name = setting.label.replace(" ", "-")
    return Pair(
        child(f"{name}-out", nixl.NixlProducer, *args, env=env),
        child(f"{name}-in", nixl.NixlConsumer, *args, env=env),
    )


def _meet(plan: TransferPlan, setting: Setting, pair: Pair) -> Way:
    met = pair.producer.call("metadata", timeout_s=READY_S)
    pair.consumer.call("connect", *met, timeout_s=READY_S)
    way = Way(setting.label, _read(pair), pair.consumer, is_peer=True, is_tcp=setting.is_tcp)
    block_bytes = 0

    def prepare(size: int) -> None:
        nonlocal block_bytes
        block_bytes = size
        pair.consumer.call("prepare", size)

    way.prepare, way.spread = prepare, lambda ids: spread(plan, block_bytes, ids)
    way.processes = tuple(pair)
    way.pause()
    return way


def _read(pair: Pair) -> Callable[[Ids, Ids], float]:
    reads = 0

    def move(here: Ids, there: Ids) -> float:
        nonlocal reads
        reads += 1
        notification = f"read-{reads}".encode()
        attend = "attend", notification, len(here)
        return float(pair.both(attend, ("read", notification, here, there)))

    return move


def spread(plan: TransferPlan, block_bytes: int, ids: Ids) -> Ids:
    """The same bytes as blocks of a memory of `LAYERS` layers, as NIXL's ends have.

    Of 32 layers with B blocks each, four make one of 8 with 4 B blocks.
    """
    blocks = plan.blocks(block_bytes)
    starts = range(0, plan.layers // LAYERS * blocks, blocks)
    return [[start + i for start in starts for i in some] for some in ids]
