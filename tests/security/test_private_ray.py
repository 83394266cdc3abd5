"""A private Ray serves this user, on this machine, and nobody else. Threat model, lines 1 and 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

RUN = """
import json, os, stat, sys
import psutil
from disagg.cluster import ray_session

def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)

session = ray_session.connect("security", lambda: None)
try:
    folder = session._folder.path
    pids = {process.pid for process in ray_session._processes(folder)} | {os.getpid()}
    listening = [
        [found.laddr.ip, found.laddr.port]
        for found in psutil.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and found.pid in pids
    ]
    address = (folder / ray_session.ADDRESS).read_text()
    json.dump({
        "listening": listening,
        "modes": [mode(folder), mode(folder.parent), mode(folder / ray_session.ADDRESS)],
        "address": address,
        "found": ray_session.private_addresses(),
        "token": mode(ray_session.token_file()),
    }, open(sys.argv[1], "w"))
    # Another program on this machine, without the token.
    import subprocess
    code = "import ray, sys; ray.init(address=sys.argv[1])"
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "HOME": "/nonexistent"}
    env.pop("RAY_AUTH_TOKEN_PATH", None)
    tried = subprocess.run(
        [sys.executable, "-c", code, address], env=env, capture_output=True, text=True, timeout=120
    )
    open(sys.argv[2], "w").write(tried.stderr if tried.returncode else "it was let in")
finally:
    session.stop()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The Ray's listeners, modes and addresses, although the environment asks for an open one."""
    folder = tmp_path_factory.mktemp("ray")
    token = folder / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o644)
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    env.pop("RAY_ADDRESS", None)
    words = [sys.executable, "-c", RUN, str(folder / "seen"), str(folder / "stranger")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "seen").read_text())
    return {**found, "stranger": (folder / "stranger").read_text()}


def test_it_listens_on_loopback_alone(seen: dict[str, Any]) -> None:
    addresses = {address.removeprefix("::ffff:") for address, _ in seen["listening"]}
    assert addresses == {"127.0.0.1"}
    assert len(seen["listening"]) > 5, "Ray's own listeners were not found"


def test_its_folders_files_and_token_are_closed(seen: dict[str, Any]) -> None:
    assert seen["modes"] == [0o700, 0o700, 0o600]
    assert seen["token"] == 0o600


def test_it_is_found_by_its_user(seen: dict[str, Any]) -> None:
    assert seen["address"] in seen["found"]


def test_it_asks_for_a_token_whatever_the_environment_says(seen: dict[str, Any]) -> None:
    assert "AuthenticationError" in seen["stranger"] or "InvalidAuthToken" in seen["stranger"]
