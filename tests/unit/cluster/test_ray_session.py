from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg.cluster import ray_session
from disagg.cluster.run_folder import RunFolder
from disagg.errors import ConfigError
from disagg.private_files import PrivateFolder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The parent folder of private Rays. The real one has a shorter path, for Ray's sockets."""
    parent = PrivateFolder(tmp_path / "disagg-ray-1", default=True).create()
    monkeypatch.setattr(ray_session, "_parent", lambda: parent)
    return parent.path


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def write(folder: Path, name: str, address: str) -> RunFolder:
    run = RunFolder(PrivateFolder(folder), "r-", name)
    run.folder.write_bytes(ray_session.ADDRESS, address.encode())
    return run


def plant_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def test_a_ray_of_ours_is_found(temporary: Path, listening: socket.socket) -> None:
    run = write(temporary, "abc", address_of(listening))
    for mode in (0o700, 0o777):  # as Ray leaves it
        run.path.chmod(mode)
        assert ray_session.private_addresses() == [address_of(listening)]
    run.remove()
    assert ray_session.private_addresses() == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: (run.path / "address").chmod(0o644),
        lambda run: (run.path / "address").write_text("203.0.113.7:6379"),
        lambda run: (run.path / "address").write_text("nonsense"),
        lambda run: (run.path / "address").write_bytes(b"\xff"),
        lambda run: (
            os.mkfifo(run.path / "fifo") or (run.path / "fifo").rename(run.path / "address")
        ),
    ],
    ids=["file", "elsewhere", "nonsense", "bytes", "fifo"],
)
def test_a_ray_that_may_be_anothers_is_not(
    temporary: Path, listening: socket.socket, spoil: Callable[[RunFolder], None]
) -> None:
    run = write(temporary, "abc", address_of(listening))
    spoil(run)
    assert ray_session.private_addresses() == []
    run.remove()


def test_another_users_server_on_our_old_port_is_not_ours(temporary: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    serve = (
        "import os, socket; os.setuid(65534); s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); s.accept()"
    )
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        run = write(temporary, "abc", f"127.0.0.1:{int(server.stdout.readline())}")
        assert ray_session.private_addresses() == []
        assert server.poll() is None, "it was connected to"
        server.kill()
    run.remove()


def test_a_planted_parent_is_refused_by_name(temporary: Path) -> None:
    temporary.chmod(0o777)
    with pytest.raises(ConfigError, match=r"disagg-ray-\d+' — has mode 777"):
        ray_session.private_addresses()


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o640])
def test_rays_token_is_closed_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 32)
    token.chmod(mode)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    ray_session._check_token_file()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://head:10001", "[fd00::1]:6379"])
def test_a_ray_without_tokens_on_a_network_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match="set RAY_AUTH_MODE=token on all nodes"):
        ray_session.connect("x", lambda: None)
    for local in ("127.0.0.1:6379", "localhost:6379", "[::1]:6379", "auto"):
        ray_session._refuse_without_token(local)


HELD_ONCE = """
import signal, threading, time
import psutil
from disagg.cluster import ray_session

def hold_the_first_raylet():
    while True:
        for child in psutil.Process().children():
            if child.name() == "raylet":
                child.send_signal(signal.SIGSTOP)
                return
        time.sleep(0.002)

threading.Thread(target=hold_the_first_raylet, daemon=True).start()
session = ray_session.connect("slow", lambda: None)
left = [each for each in psutil.Process().children() if each.status() == psutil.STATUS_STOPPED]
print("started" if session.private and not left else f"left: {left}")
session.stop()
"""


@pytest.mark.slow
def test_a_node_that_is_slow_is_started_again() -> None:
    """Ray gives a node 30 s, which a busy machine with cold disks may not keep."""
    words = [sys.executable, "-c", HELD_ONCE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "Ray did not start within its 30 s; disagg starts it once more" in done.stderr
    assert done.stdout.strip() == "started"
