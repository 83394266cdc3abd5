"""The example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.testing.vllm_server import CPU_ENV

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "hidden_states.py"), "--folder", str(tmp_path)],
        env={**os.environ, **CPU_ENV, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "\nequal to plain transformers" in done.stdout
    assert not list(tmp_path.glob("*.safetensors"))  # it tidied up
