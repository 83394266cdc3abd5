"""`ray job submit` of a folder from an environment that has only Ray, a command from another job,
and `ray job stop`, which leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml

from cluster.titles import title
from disagg.engine import guardian
from disagg.testing.checkpoint import make_model
from disagg.testing.ports import free_port
from disagg.testing.ray_nodes import RayNodes

START_S, GONE_S = 240, 30
OF_RUNS = ("disagg-run-", "disagg-ipc-")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * START_S + 60)]


@pytest.fixture(scope="module")
def ray_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `ray` command of an environment without vLLM and disagg."""
    venv = tmp_path_factory.mktemp("client") / "venv"
    uv, python = [sys.executable, "-m", "uv"], venv / "bin" / "python"
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, venv], check=True, timeout=60)
    wanted = f"ray[default]=={ray.__version__}"
    subprocess.run([*uv, "pip", "install", "-q", "--python", python, wanted], check=True)
    listed = subprocess.run(
        [*uv, "pip", "freeze", "--python", python], check=True, capture_output=True, text=True
    ).stdout
    assert not any(name in listed for name in ("vllm", "torch", "disagg")), listed
    return venv / "bin" / "ray"


class Jobs:
    """Ray's command line."""

    def __init__(self, command: Path, url: str) -> None:
        self._command = str(command)
        self._env = {"RAY_ADDRESS": url, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}

    def ray(self, *words: str) -> str:
        done = subprocess.run(
            [self._command, "job", *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, name: str, folder: Path, *words: str) -> None:
        self.ray("submit", "--no-wait", "--submission-id", name, "--working-dir", str(folder),
                 "--", sys.executable, "-m", "disagg.cli", *words)  # fmt: skip

    def until_shown(self, name: str, word: str) -> str:
        deadline = time.monotonic() + START_S
        while word not in (log := self.ray("logs", name)):
            assert time.monotonic() < deadline, log
            assert "failed" not in self.ray("status", name).lower(), log
            time.sleep(1)
        return log


def engines(cluster: RayNodes) -> list[psutil.Process]:
    """The processes of disagg's engines and routers."""
    names = ("PrefillEngine", "DecodeEngine", "RouterActor", "VLLM::", "spawn_main")
    return [p for p in cluster.processes() if any(n in title(p) for n in names)]


def segments(processes: Iterable[psutil.Process]) -> set[str]:
    """The shared memory that these processes have."""
    return {name for process in processes for name in guardian._mapped(process.pid)}


def files(folder: Path) -> list[str]:
    """All files below this folder, and the folders of runs and of engines."""
    found = []
    for place, folders, names in os.walk(folder):  # some go meanwhile
        found += [str(Path(place, name)) for name in names]
        found += [str(Path(place, name)) for name in folders if name.startswith(OF_RUNS)]
    return sorted(found)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of all nodes. Its path is short: sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="dj-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def complete(port: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "the quick brown fox " * 50, "max_tokens": 4}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_submitted_scaled_and_stopped(tmp_path: Path, ray_alone: Path, temporary: Path) -> None:
    make_model(tmp_path / "tiny")
    store = temporary / "store"
    store.mkdir()
    port = free_port()
    content = {
        "name": "job",
        "model": {"path": "tiny", "served_name": "tiny"},
        "engine": {
            "args": {
                "dtype": "float32",
                "max_model_len": 2048,
                "block_size": 128,
                "num_gpu_blocks_override": 64,
            }
        },
        "ray": {"without_token": True},  # it listens at all addresses of this machine
        "router": {"port": port},
        "transfer": {"transports": ["shared_storage"], "storage": {"path": str(store)}},
    }
    (tmp_path / "d.yaml").write_text(yaml.safe_dump(content))
    with RayNodes(1, cpus=4, dashboard=True) as cluster:
        jobs = Jobs(ray_alone, cluster.dashboard_url)
        jobs.ray("list")  # once the dashboard answers, its own files are there
        of_ray = set(files(temporary))
        jobs.submit("serve", tmp_path, "serve", "d.yaml")
        jobs.until_shown("serve", "Ready: ")
        assert complete(port)["usage"]["completion_tokens"] == 4
        jobs.submit("scale", tmp_path, "scale", "decode=2")
        assert "decode-1 serves" in jobs.until_shown("scale", "done")
        there = engines(cluster)
        assert len(there) >= 3 * 3 + 1
        shared = segments(there)
        assert shared
        made = " ".join(files(temporary))
        for kind in (".owner", ".probe", ".running", ".sock", "disagg-ipc-"):
            assert kind in made, kind
        jobs.ray("stop", "serve")
        _, left = psutil.wait_procs(there, timeout=GONE_S)
        assert left == []
        deadline = time.monotonic() + GONE_S  # guardians outlive what they guard by seconds
        while found := (set(files(temporary)) - of_ray) | (shared & set(os.listdir(guardian.SHM))):
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
