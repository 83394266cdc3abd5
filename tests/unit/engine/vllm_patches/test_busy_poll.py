"""The plugin that vLLM loads: off unless the environment switches it on, and never an error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import entry_points

import pytest

from disagg.engine.vllm_patches import busy_poll
from disagg.engine.vllm_patches.busy_poll import POLL_SLEEP_ENV

# vLLM is imported once. Each value of the environment is tried in a fork.
MEASURE = """
import os, posix, sys, time
from vllm.plugins import load_general_plugins
for value in sys.argv[2:]:
    if os.fork() == 0:
        if value != "none":
            os.environ[sys.argv[1]] = value
        load_general_plugins()
        began = time.perf_counter()
        for _ in range(100):
            os.sched_yield()
        own = os.sched_yield is posix.sched_yield
        print("measured", value, time.perf_counter() - began, own, flush=True)
        break
    os.wait()
"""


@pytest.fixture(scope="module")
def yields() -> dict[str, tuple[float, bool]]:
    """By the variable's value: seconds of 100 yields, and whether they are the system's own."""
    env = {k: v for k, v in os.environ.items() if k != POLL_SLEEP_ENV}
    command = [sys.executable, "-c", MEASURE, POLL_SLEEP_ENV, "20000", "none", "soon"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    # vLLM before 0.31 writes its log there too.
    words = [line.split() for line in done.stdout.splitlines()]
    lines = [line[1:] for line in words if line[:1] == ["measured"]]
    return {value: (float(seconds), own == "True") for value, seconds, own in lines}


def test_a_worker_sleeps_longer_in_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds + 5e-6

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    nap = busy_poll.Naps(50e-6)
    now = 1.0
    while now < 1.02:
        nap()
    assert slept == sorted(slept)
    assert (slept[0], slept[-1]) == (50e-6, 1e-3)
    assert len(slept) < 60, "of 400"
    for _ in range(20):  # one message after the other
        now += 0.001
        nap()
    assert slept[-20:] == [50e-6] * 20


def test_vllm_finds_it() -> None:
    assert "disagg" in entry_points(group="vllm.general_plugins").names


def test_sleeps_when_asked(yields: dict[str, tuple[float, bool]]) -> None:
    seconds, is_own = yields["20000"]
    assert seconds >= 2
    assert not is_own


@pytest.mark.parametrize("value", ["none", "soon"])
def test_spins_otherwise(yields: dict[str, tuple[float, bool]], value: str) -> None:
    _, is_own = yields[value]
    assert is_own
