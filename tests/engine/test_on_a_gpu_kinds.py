"""Every kind of KV cache on one GPU: what vLLM registers there, handoffs over CUDA IPC, and tiers.

What an engine registers must be what `gpu_layouts` computes without a GPU (docs/gpu_layouts.md).
All engines start together, and pytest runs all tests of one kind before the next one's. So a kind
whose engines are slow, or do not start, costs no other its tests. CI has no GPU; `make gpu` runs
this where vLLM is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gpu_layouts.description import RECORD

from disagg.testing.checkpoint import make_model
from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.testing.waiting import eventually
from disagg.transport.nixl.settings import is_installed
from engine import followed
from engine.conftest import beside, tiers, transfer
from engine.engines_with_tiers import ANSWER, EnginesWithTiers, files, forget, is_idle
from engine.windows import (
    make_dense_gated_deltas,
    make_latent,
    make_states,
    make_windows,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no cupy"),
    pytest.mark.timeout(600),
]
TESTS = Path(__file__).parents[1]
GPUS = {(9, 0): "hopper", (10, 0): "blackwell"}
BLOCKS, MAX_LENGTH = 2048, 8192  # the length is that of `gpu_layouts.registered`
STEP = 2048  # tokens that are computed at once
ARGS = (
    *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30)),
    *("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(MAX_LENGTH)),
    *("--max-num-batched-tokens", str(STEP)),
)
HANDED, BROUGHT_BACK = "disagg_handoffs_total", "vllm:kv_offload_total_bytes_total"
Prompt = Callable[[int], list[int]]


class Kind(NamedTuple):
    """make: writes the checkpoint. exact: whether vLLM computes it batch-invariantly. tiered: how
    many engines have tiers. args: of vLLM. transport: of handoffs."""

    make: Callable[[Path], object]
    exact: bool = True
    tiered: int = 1
    args: tuple[str, ...] = ()
    transport: str = "cuda_ipc"


# FlashInfer's kernel is vLLM's default for prefill, and needs its package.
_TRITON = ("--additional-config", json.dumps({"gdn_prefill_backend": "triton"}))
_NO_FLASHINFER = importlib.util.find_spec("flashinfer") is None
# Of smaller models, a token computed behind cached blocks may differ from one computed with the
# whole prompt, on a single engine too.
_wide = partial(make_model, hidden=1024, kv_heads=8, head_dim=128)
KINDS = {
    "full": Kind(_wide, tiered=2),
    "windows": Kind(make_windows, exact=False, tiered=2),
    "latent": Kind(partial(make_latent, layers=4), exact=False),
    **({"nixl": Kind(_wide, tiered=0, transport="nixl")} if is_installed() else {}),
    # vLLM tunes their kernels when it starts, for a minute and longer.
    "mamba": Kind(make_states, exact=False),
    "linear": Kind(make_dense_gated_deltas, exact=False, args=_TRITON if _NO_FLASHINFER else ()),
}


class Engines(NamedTuple):
    """first: with the handoff alone; it writes `record`. others: with tiers beside it, in one
    folder."""

    kind: Kind
    model: Path
    record: Path
    first: VllmServer
    others: list[VllmServer]

    @property
    def second(self) -> VllmServer:
        return self.others[0]

    def group(self) -> tuple[int, int]:
        """The largest group's tokens per block, and the bytes of its block in all its layers."""
        groups = json.loads(self.record.read_text())["groups"]
        largest = max(groups, key=lambda group: group["block_size"])
        return largest["block_size"], largest["page_bytes"] * len(largest["layers"])


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Engines]]:
    """All that this run's tests use, which may not be ready yet."""
    callspecs = (getattr(item, "callspec", None) for item in request.session.items)
    used = {spec.params.get("engines") for spec in callspecs if spec is not None}
    found: dict[str, Engines] = {}
    try:
        for name, kind in reversed(KINDS.items()):  # the last ones take longest
            if name not in used:
                continue
            found[name] = _engines(name, kind, tmp_path_factory.mktemp(name))
            for server in (found[name].first, *found[name].others):
                server.launch()
        yield found
    finally:
        for engines in found.values():
            for server in (engines.first, *engines.others):
                server.stop()


def _engines(name: str, kind: Kind, folder: Path) -> Engines:
    model, record = folder / "model", folder / "record.json"
    kind.make(model)
    env = {
        "VLLM_BATCH_INVARIANT": str(int(kind.exact)),
        "VLLM_SERVER_DEV_MODE": "1",
        "DISAGG_SECRET": "of this test, not of others",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        RECORD: str(record),
    }
    handoff = transfer("kv_both", transports=[kind.transport])
    kept = tiers(host_bytes=1 << 28, directory=str(folder / "tier"), reset_keeps_files=True)

    def server(number: int, config: dict[str, object]) -> VllmServer:
        return VllmServer(
            f"{name}-{number}",
            model,
            folder / f"{number}.log",
            config,
            (*ARGS, *kind.args),
            "bfloat16",
            env,
            block_size=None,
        )

    others = [server(2 + n, beside(handoff, kept)) for n in range(kind.tiered)]
    others = others or [server(2, handoff)]
    return Engines(kind, model, record, server(1, recording(handoff)), others)


def recording(handoff: dict[str, object]) -> dict[str, object]:
    """The same, and it writes what it was given."""
    module = {"kv_connector_module_path": "gpu_layouts.recorder"}
    return {**handoff, "kv_connector": "RecordingConnector", **module}


@pytest.fixture(scope="module")
def engines(started: dict[str, Engines], request: pytest.FixtureRequest) -> Engines:
    """Of one kind, ready."""
    found = started[request.param]
    for server in (found.first, *found.others):
        server.wait_ready()
    return found


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Prompt:
    draw = random.Random(request.node.nodeid)
    return lambda length: draw.choices(range(300, 4000), k=length)


def of_kinds(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engines", names, indirect=True, scope="module")


of_each_kind = of_kinds(*KINDS)


# ---- what is registered --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def computed(started: dict[str, Engines]) -> dict[str, Any]:
    """What `gpu_layouts` computes for these engines, in a process without a GPU."""
    gpu = GPUS.get(torch.cuda.get_device_capability())
    if gpu is None:
        pytest.skip(f"gpu_layouts knows {list(GPUS)} alone")
    asked = [
        {
            "model": json.loads((started[name].model / "config.json").read_text()),
            "connector": started[name].first.transfer,
            "blocks": BLOCKS,
            "args": _of_engine(started[name].kind),
        }
        for name in started
    ]
    ran = subprocess.run(
        [sys.executable, "-m", "gpu_layouts.computed", gpu],
        input="".join(json.dumps(one) + "\n" for one in asked),
        env={**os.environ, "PYTHONPATH": next(iter(started.values())).first.env["PYTHONPATH"]},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return dict(zip(started, map(json.loads, lines), strict=True))


def _of_engine(kind: Kind) -> dict[str, Any]:
    """The engine's arguments as vLLM's `EngineArgs` names them."""
    found: dict[str, Any] = {"dtype": "bfloat16"}
    if kind.args:
        found["additional_config"] = json.loads(kind.args[1])
    return found


@of_each_kind
def test_registered_as_computed(engines: Engines, computed: dict[str, Any]) -> None:
    name = next(name for name, kind in KINDS.items() if kind is engines.kind)
    assert json.loads(engines.record.read_text()) == computed[name]


# ---- handoffs ------------------------------------------------------------------------------------


@of_each_kind
def test_handed_over(engines: Engines, prompt: Prompt) -> None:
    """Of a prompt of whole blocks and a token, decode computes the last token, as an engine does
    that has the blocks in its own prefix cache: the same step over the same bytes."""
    first, second, block = engines.first, engines.second, engines.group()[0]
    loaded = {"outcome": "loaded", "transport": engines.kind.transport}
    before, counts = second.metric(HANDED, **loaded), (1, 3, 10, 3000 // block)
    for count in counts:
        ids = prompt(count * block + 1)
        params = first.prefill(ids)
        expected = token_ids(first.complete(ids, max_tokens=32))
        handed = second.complete(ids, max_tokens=32, kv_transfer_params=params)
        assert token_ids(handed) == expected, len(ids)
    assert second.metric(HANDED, **loaded) - before == len(counts)


@of_kinds(*(name for name, kind in KINDS.items() if kind.exact))
def test_tokens_are_one_engines(engines: Engines, prompt: Prompt) -> None:
    """Of any length, and computed as a whole by the first engine."""
    first, second = engines.first, engines.second
    for length in (2, 40, 257, 1000, 3000):
        ids = prompt(length)
        alone = token_ids(first.complete(ids, max_tokens=32))
        params = first.prefill(ids)
        handed = second.complete(ids, max_tokens=32, kv_transfer_params=params)
        assert token_ids(handed) == alone, length


@of_each_kind
def test_followed(engines: Engines, prompt: Prompt) -> None:
    """While the first engine computes it, in several steps. As `test_handed_over`."""
    first, second, block = engines.first, engines.second, engines.group()[0]
    loaded = {"outcome": "loaded", "transport": engines.kind.transport}
    invited = followed.invitation(first, second)
    before, lengths = second.metric(HANDED, **loaded), (block, STEP + block, MAX_LENGTH - 500)
    for length in lengths:
        ids = prompt(length - length % block + 1)
        handed = followed.handed_off(first, second, ids, invited, max_tokens=32)
        expected = token_ids(first.complete(ids, max_tokens=32))
        assert token_ids(handed) == expected, len(ids)
    assert second.metric(HANDED, **loaded) - before == len(lengths)


# ---- tiers ---------------------------------------------------------------------------------------


@of_kinds(*(name for name, kind in KINDS.items() if kind.tiered))
def test_tiers_bring_it_back(engines: Engines, prompt: Prompt) -> None:
    """From host memory and from files, as the engine's own prefix cache has it."""
    second, (block, size) = engines.second, engines.group()

    def moved(medium: str) -> int:
        return int(second.metric(BROUGHT_BACK, transfer_type=medium)) // size

    for count in (3, 2400 // block):
        ids, stored = prompt(count * block + 1), files(second)
        cold = token_ids(second.complete(ids, max_tokens=32))
        expected = token_ids(second.complete(ids, max_tokens=32))
        assert expected == cold or not engines.kind.exact
        assert eventually(lambda stored=stored: files(second) > stored and is_idle(second))
        loads = []
        for medium, host in (("CPU_to_GPU", False), ("STORAGE_to_CPU", True)):
            forget(second, host=host)
            before = moved(medium)
            assert token_ids(second.complete(ids, max_tokens=32)) == expected, (len(ids), medium)
            loads.append(moved(medium) - before)
        assert loads[0] == loads[1] > 0
    assert not sum(second.metrics("disagg_tier_failures").values())


def with_tiers(engines: Engines) -> EnginesWithTiers:
    first, second = engines.others
    return EnginesWithTiers(engines.first, first, second, engines.group()[1], "cuda_ipc")


@pytest.mark.parametrize("length", [129, 640, 3001])
@of_kinds("full")
def test_tiers_keep_and_load_what_is_needed(engines: Engines, length: int, prompt: Prompt) -> None:
    size = engines.group()[0]
    full, kept = (length - 1) // size, (length + ANSWER - 1) // size
    with_tiers(engines).check_what_is_loaded(prompt, length, full * size, kept, (full, kept))


@of_kinds("full")
def test_tiers_beside_handoffs_at_once(engines: Engines, prompt: Prompt) -> None:
    with_tiers(engines).check_under_pressure(prompt)
