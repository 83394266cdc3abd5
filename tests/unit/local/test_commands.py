"""`disagg ls` and `disagg stop`, with processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.errors import ConfigError, DisaggError
from disagg.local.commands import show, stop

SERVES = """
import signal, sys, time
from disagg.local.running import Announced
announced = [Announced(name, name + "-1", "m") for name in sys.argv[2:]]
def end(*_):
    if sys.argv[1] == "ends":
        [one.remove() for one in announced]
        sys.exit(0)
signal.signal(signal.SIGTERM, end)
for one in announced:
    one.serves("http://127.0.0.1:1", "/socket")
print("there", flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tempfile.tempdir = None
    yield
    tempfile.tempdir = None


def serving(*words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVES, *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def test_what_runs_is_listed_and_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    process = serving("ends", "chat", "code")
    assert show(as_json=True) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["state"], one["pid"]) for one in listed] == [
        ("chat", "serves", process.pid),
        ("code", "serves", process.pid),
    ]
    assert show(as_json=False) == 0
    assert "http://127.0.0.1:1" in capsys.readouterr().out
    # The parent must reap it, or it would stay a process until the end of this one.
    signal.signal(signal.SIGCHLD, lambda *_: process.poll())
    try:
        assert stop("chat", timeout_s=20) == 0
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert "stopping chat, with code of the same file" in capsys.readouterr().out
    assert process.wait(10) == 0
    assert show(as_json=False) == 0
    assert "no deployment" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no deployment"):
        stop(None, timeout_s=1)


def test_one_that_does_not_end_is_named() -> None:
    process = serving("stays", "chat")
    try:
        with pytest.raises(DisaggError, match=rf"chat has not ended .* kill {process.pid}"):
            stop(None, timeout_s=0.3)
    finally:
        process.kill()
        process.wait(10)
