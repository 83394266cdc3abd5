"""The plugin that vLLM loads: off unless the environment switches it on, and never an error."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from disagg.engine.vllm_patches.busy_poll import POLL_SLEEP_ENV

# vLLM is imported once. Each value of the environment is tried in a fork.
MEASURE = """
import os, sys, time
from vllm.plugins import load_general_plugins
for value in sys.argv[2:]:
    if os.fork() == 0:
        if value != "none":
            os.environ[sys.argv[1]] = value
        load_general_plugins()
        began = time.perf_counter()
        for _ in range(100):
            os.sched_yield()
        print(value, time.perf_counter() - began, flush=True)
        break
    os.wait()
"""


@pytest.fixture(scope="module")
def seconds_of_100_yields() -> dict[str, float]:
    """By the variable's value."""
    env = {k: v for k, v in os.environ.items() if k != POLL_SLEEP_ENV}
    command = [sys.executable, "-c", MEASURE, POLL_SLEEP_ENV, "20000", "none", "soon"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()[-3:]]
    return {value: float(seconds) for value, seconds in lines}


def test_vllm_finds_it() -> None:
    assert "disagg" in entry_points(group="vllm.general_plugins").names


def test_sleeps_when_asked(seconds_of_100_yields: dict[str, float]) -> None:
    assert seconds_of_100_yields["20000"] >= 2


@pytest.mark.parametrize("value", ["none", "soon"])
def test_spins_otherwise(seconds_of_100_yields: dict[str, float], value: str) -> None:
    assert seconds_of_100_yields[value] < 2
