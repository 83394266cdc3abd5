from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disagg.cluster.run_folder import LOCK, RunFolder, sweep
from disagg.errors import ConfigError

PREFIX = "disagg-run-"
MAKE = f"""
import os, sys
from pathlib import Path
from disagg.cluster.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), "{PREFIX}", sys.argv[2])
(folder.path / "file").write_text("content")
os.kill(os.getpid(), 9)
"""


def left_behind(parent: Path, name: str) -> Path:
    """The folder of a run that was killed."""
    subprocess.run([sys.executable, "-c", MAKE, str(parent), name], check=False, timeout=60)
    folder = parent / f"{PREFIX}{name}"
    assert (folder / "file").exists()
    return folder


def test_a_killed_runs_folder_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    dead, living = left_behind(tmp_path, "dead"), RunFolder(tmp_path, PREFIX, "living")
    sweep(tmp_path, PREFIX)
    assert not dead.exists()
    assert living.path.exists()
    living.remove()
    assert os.listdir(tmp_path) == []


def test_a_guarded_folder_goes_with_its_process(tmp_path: Path) -> None:
    guarded = MAKE.replace("sys.argv[2])", "sys.argv[2]).guarded()")
    subprocess.run([sys.executable, "-c", guarded, str(tmp_path), "x"], check=False, timeout=60)
    deadline = time.monotonic() + 30
    while os.listdir(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    dead = left_behind(tmp_path, "dead")
    record = (dead / LOCK).read_text()
    _, pid, started = record.split("-")
    kept = {
        "models": record,  # no prefix of ours
        f"{PREFIX}hostname": "a-host",
        f"{PREFIX}new": "",
        f"{PREFIX}another-machine": f"{'f' * 16}-{pid}-{started}",
        f"{PREFIX}open": record,
    }
    for name, owner in kept.items():
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / LOCK).write_text(owner)
    (tmp_path / f"{PREFIX}open").chmod(0o755)
    (tmp_path / f"{PREFIX}link").symlink_to(dead)
    (tmp_path / f"{PREFIX}fifo").mkdir(mode=0o700)
    os.mkfifo(tmp_path / f"{PREFIX}fifo" / LOCK)
    sweep(tmp_path, PREFIX)
    left = sorted(os.listdir(tmp_path))
    assert left == sorted([*kept, f"{PREFIX}link", f"{PREFIX}fifo"])


def test_a_folder_that_exists_is_anothers(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}x").mkdir()
    with pytest.raises(ConfigError, match="cannot create"):
        RunFolder(tmp_path, PREFIX, "x")
