"""Our connector driven by hand, as examples/without_vllm_engine.py does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "without_vllm_engine.py"


@pytest.mark.slow
def test_two_workers_without_an_engine() -> None:
    command = [sys.executable, str(EXAMPLE), "--mib", "8", "--times", "2", "--transport", "tcp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("loaded by tcp: 8 MiB") == 2
