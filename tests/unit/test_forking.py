"""Workers are forks only where vLLM binds no threads, and never of the actor itself."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from disagg.engine import forking

METHOD, BIND = "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND"


def method_after(environment: dict[str, str]) -> str:
    """What vLLM would do in one of its processes."""
    os.environ.update(environment)
    forking.install()
    return os.environ[METHOD]


@pytest.mark.parametrize(
    ("fork", "bind", "method"),
    [("1", "nobind", "fork"), ("0", "nobind", "spawn"), ("1", "auto", "spawn")],
)
def test_in_a_process_of_vllms(fork: str, bind: str, method: str) -> None:
    environment = {forking.FORK_ENV: fork, BIND: bind, METHOD: "spawn"}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(method_after, (environment,)) == method


def test_not_in_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((forking.FORK_ENV, "1"), (BIND, "nobind"), (METHOD, "spawn")):
        monkeypatch.setenv(name, value)
    forking.install()
    assert os.environ[METHOD] == "spawn"
