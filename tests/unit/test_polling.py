"""The plugin that vLLM loads: off unless asked for, and never a reason for an engine to end."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from disagg.engine.polling import POLL_SLEEP_ENV

MEASURE = """
import os, time
from vllm.plugins import load_general_plugins
load_general_plugins()
began = time.perf_counter()
for _ in range(100):
    os.sched_yield()
print(time.perf_counter() - began)
"""


def seconds_of_100_yields(value: str | None) -> float:
    env = {k: v for k, v in os.environ.items() if k != POLL_SLEEP_ENV}
    if value is not None:
        env[POLL_SLEEP_ENV] = value
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], env=env, capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def test_vllm_finds_it() -> None:
    assert "disagg_polling" in entry_points(group="vllm.general_plugins").names


def test_sleeps_when_asked() -> None:
    assert seconds_of_100_yields("20000") >= 2


@pytest.mark.parametrize("value", [None, "soon"])
def test_spins_otherwise(value: str | None) -> None:
    assert seconds_of_100_yields(value) < 2
