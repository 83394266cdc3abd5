"""A lost terminal stops a deployment in order, and never kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from disagg.cluster.ray_session import _without_hangup
from disagg.cluster.signals import Interrupted, StopSignals


def test_a_hangup_stops_once_and_never_kills() -> None:
    killed: list[bool] = []
    with StopSignals(lambda: killed.append(True)):
        with pytest.raises(Interrupted) as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stopped.value.signum == signal.SIGHUP
        os.kill(os.getpid(), signal.SIGHUP)
        assert killed == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert killed == [True]


def test_under_nohup_it_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(lambda: None):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_processes_of_ray_get_none() -> None:
    with StopSignals(lambda: None):
        with _without_hangup():
            command = "input(); print('lives')"
            child = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)  # fmt: skip
        child.send_signal(signal.SIGHUP)
        assert child.communicate("\n", timeout=60)[0] == "lives\n"
