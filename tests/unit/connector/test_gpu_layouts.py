"""What vLLM registers on GPUs for the models that people run: moved right, or refused by name.

docs/gpu_layouts.md has the results as tables. `python tests/unit/connector/test_gpu_layouts.py`
writes them anew.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_layouts import tables
from transport.host_device import COMPILER

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "gpu_layouts.md"
GPUS = ("hopper", "blackwell")
_LIMIT_S = 280

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host")


@functools.cache
def rows_of(gpu: str) -> list[tables.Row]:
    """All rows of one GPU, from a process of its own, which becomes that GPU."""
    command = [sys.executable, "-m", "gpu_layouts.report", gpu]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    ran = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return [tables.read(line) for line in lines]


@pytest.mark.parametrize("gpu", GPUS)
def test_no_byte_is_wrong(gpu: str) -> None:
    rows = rows_of(gpu)
    assert len(rows) >= 30
    assert not [row for row in rows if "WRONG" in row.handoff + row.tiers]
    assert not [row for row in rows if row.built], "vLLM did not build it"


@pytest.mark.parametrize("gpu", GPUS)
def test_the_documented_table(gpu: str) -> None:
    """Run this module as a script after a change that is meant."""
    assert tables.table(rows_of(gpu)) in PAGE.read_text()


def test_pools_of_different_gpus() -> None:
    """The documented ones exchange blocks: their caches have one fingerprint, and like layers."""
    assert tables.exchanges(*map(rows_of, GPUS)) in PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(tables.rewritten(PAGE.read_text(), *map(rows_of, GPUS)))
