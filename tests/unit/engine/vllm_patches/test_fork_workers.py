"""Workers are forked only if vLLM binds no threads, and never from the actor itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from disagg.engine.vllm_patches import fork_workers, patching

METHOD, BIND = "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND"
# vLLM's processes are children of multiprocessing.
INSTALL = f"""
import multiprocessing, os
from disagg.engine.vllm_patches import fork_workers, patching
def process():
    patching.install([fork_workers.PATCH])
    print(os.environ["{METHOD}"], flush=True)
child = multiprocessing.get_context("fork").Process(target=process)
child.start()
child.join()
"""


@pytest.mark.parametrize(
    ("fork", "bind", "method"),
    [("1", "nobind", "fork"), ("0", "nobind", "spawn"), ("1", "auto", "spawn")],
)
def test_in_a_process_of_vllms(fork: str, bind: str, method: str) -> None:
    env = os.environ | {fork_workers.FORK_ENV: fork, BIND: bind, METHOD: "spawn"}
    command = [sys.executable, "-c", INSTALL]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [method]


def test_not_in_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((fork_workers.FORK_ENV, "1"), (BIND, "nobind"), (METHOD, "spawn")):
        monkeypatch.setenv(name, value)
    patching.install([fork_workers.PATCH])
    assert os.environ[METHOD] == "spawn"
