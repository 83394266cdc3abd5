"""The files by which commands find the deployments of this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.local.running import Announced, find, running

SERVES = """
import sys
from disagg.local.running import Announced
announced = Announced(sys.argv[1], sys.argv[1] + "-1", "m")
announced.serves("http://127.0.0.1:1", "/socket")
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tempfile.tempdir = None
    yield
    tempfile.tempdir = None


def test_a_deployment_is_found_by_name_and_by_run() -> None:
    assert running() == []
    with pytest.raises(ConfigError, match="no deployment of yours runs on this machine"):
        find(None)
    chat = Announced("chat", "chat-1", "org/chat")
    (one,) = running()
    assert (one.name, one.model, one.state, one.url) == ("chat", "org/chat", "starts", "")
    chat.serves("http://127.0.0.1:8000", "/tmp/socket")
    assert find(None) == find("chat") == find("chat-1")
    assert (find(None).state, find(None).socket) == ("serves", "/tmp/socket")
    with pytest.raises(ConfigError, match="no such deployment runs on this machine, but chat"):
        find("other")
    code = Announced("code", "code-1", "org/code")
    with pytest.raises(ConfigError, match="name one of chat-1, code-1"):
        find(None)
    chat.remove()
    code.remove()
    assert running() == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVES, "lost"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    assert find("lost").pid == process.pid
    process.kill()
    process.communicate(timeout=10)
    assert running() == []
    assert not list(tmp_path.rglob("*.running"))


def test_what_is_no_file_of_ours_costs_nothing(tmp_path: Path) -> None:
    announced = Announced("chat", "chat-1", "m")
    (folder,) = tmp_path.iterdir()
    (folder / "odd.running").write_text("{")
    (folder / "other.running").write_text('{"name": 5}')
    assert [one.name for one in running()] == ["chat"]
    announced.remove()
