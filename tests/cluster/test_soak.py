"""A short form of `make soak`: a whole deployment, whose sockets are cut and workers stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_sabotage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "disagg.cli", "bench", "soak", "--requests", "60"]
    command += ["--transports", "tcp,shared_storage"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held at the end: nothing" in done.stdout
    disturbed = re.search(r"sabotage: \{(.*)\}", done.stdout)
    assert disturbed, done.stdout
    assert "sockets cut" in disturbed[1] or "stopped for" in disturbed[1]
