"""What vLLM registers on GPUs for the models that people run: moved right, or refused by name.

docs/gpu_layouts.md has the results as tables. `python tests/unit/connector/test_gpu_layouts.py`
writes them anew.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_layouts import tables
from gpu_layouts.models import MODELS
from gpu_layouts.report import CONNECTOR
from transport.host_device import COMPILER
from vllm.v1.worker import utils

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "gpu_layouts.md"
GPUS = ("hopper", "blackwell")
_LIMIT_S = 280

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host"),
    pytest.mark.skipif(
        not hasattr(utils, "customize_attention_spec"),
        reason="the tables are of versions whose backends choose the spec",
    ),
]


SHORT = (
    "Llama 3.1 8B",
    "Qwen3-Next 80B",
    "Gemma 4 31B",
    "DeepSeek-V3.2",
    "DeepSeek-V4",
    "Llama 3.1 8B + block_size: 128",
)
"""One model of each kind of cache; all of them take minutes."""


def of_process(module: str, *args: str, given: str = "") -> list[str]:
    """The lines of JSON of a module of `gpu_layouts`, which becomes that GPU."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    ran = subprocess.run(
        [sys.executable, "-m", f"gpu_layouts.{module}", *args],
        input=given,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [line for line in ran.stdout.splitlines() if line.startswith("{")]


@functools.cache
def rows_of(gpu: str, models: tuple[str, ...] = ()) -> list[tables.Row]:
    """The rows of one GPU, all without `models`; from a process that becomes that GPU."""
    more = ["--models", *models] if models else []
    return [tables.read(line) for line in of_process("report", gpu, *more)]


def check(gpu: str, models: tuple[str, ...] = ()) -> None:
    """No byte is wrong, vLLM built all models, and the page says the same."""
    rows = rows_of(gpu, models)
    assert len(rows) >= 2 * len(models or range(19))
    assert not [row for row in rows if "WRONG" in row.handoff + row.tiers or row.built]
    documented = tables.block(PAGE.read_text(), gpu).splitlines()
    lines = tables.table(rows).splitlines()
    assert [line for line in lines if line not in documented] == []
    assert models or lines == documented


@pytest.mark.parametrize(
    "gpu", [GPUS[0], *(pytest.param(g, marks=pytest.mark.slow) for g in GPUS[1:])]
)
def test_one_model_of_each_kind(gpu: str) -> None:
    check(gpu, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_all_models(gpu: str) -> None:
    check(gpu)


@pytest.mark.slow
def test_pools_of_different_gpus() -> None:
    """The documented ones exchange blocks: their caches have one fingerprint, and like layers."""
    assert tables.exchanges(*map(rows_of, GPUS)) == tables.block(PAGE.read_text(), "both")


@pytest.mark.slow
def test_two_pools_of_the_same_model() -> None:
    """Attention backends differ, and neither the layout nor what workers compare does."""
    of_gpu = [{(row.model, row.dtype): row for row in rows_of(gpu, SHORT)} for gpu in GPUS]
    for model in ("Llama 3.1 8B", "Gemma 4 31B"):
        hopper, blackwell = (rows[model, "auto"] for rows in of_gpu)
        assert hopper.backends != blackwell.backends
        assert hopper.identity == blackwell.identity != ""


@pytest.mark.slow
def test_what_an_engine_of_a_gpu_is_compared_with() -> None:
    """`engine/test_on_a_gpu_kinds.py` compares it with what real engines registered."""
    asked = {
        "model": MODELS["Gemma 3 27B"],
        "connector": {**CONNECTOR},
        "blocks": 64,
        "args": {"dtype": "bfloat16"},
    }
    (line,) = of_process("computed", "hopper", given=json.dumps(asked) + "\n")
    found = json.loads(line)
    assert (found["layout"], found["blocks"]) == ("LBHNC", 64)
    assert {group["block_size"] for group in found["groups"]} == {16}
    assert sum(len(group["layers"]) for group in found["groups"]) == len(found["layers"]) == 14
    kinds = {group["spec"] for group in found["groups"]}
    assert kinds == {"FullAttentionSpec", "SlidingWindowSpec"}
    for layer in found["layers"].values():
        assert layer["backend"] == "FLASH_ATTN"
        assert layer["shape"] == [64, 16, 16, 2 * 128]  # blocks, heads, tokens, K and V
        page = 16 * 16 * 2 * 128 * 2
        assert layer["strides"] == [page // 2, 16 * 256, 256, 1]
        assert layer["offset"] + 64 * page <= layer["allocation_bytes"]


if __name__ == "__main__":
    PAGE.write_text(tables.rewritten(PAGE.read_text(), *map(rows_of, GPUS)))
