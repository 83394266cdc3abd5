"""The operators' socket: what it replaces, and what it leaves."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.router.server.admin_socket import open_admin_socket, peer_of
from disagg.router.server.api_keys import SocketPeer


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "own" / "router.sock"


def test_the_kernel_says_who_connects(at: Path) -> None:
    admin = open_admin_socket(at, 1)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(at))
        connection, _ = admin.socket.accept()
        with connection:
            assert peer_of(connection) == SocketPeer(os.getpid(), os.getuid())
    admin.remove()
    assert not at.exists()


def test_the_socket_of_a_router_that_was_killed_is_replaced(at: Path) -> None:
    open_admin_socket(at, 1).socket.close()
    assert at.is_socket()
    open_admin_socket(at, 1).remove()


def test_the_socket_of_a_router_that_lives_is_not(at: Path) -> None:
    admin = open_admin_socket(at, 1)
    with pytest.raises(ConfigError, match="another router listens there"):
        open_admin_socket(at, 1)
    admin.remove()


def test_a_socket_that_has_replaced_ours_stays(at: Path) -> None:
    admin = open_admin_socket(at, 1)
    at.unlink()
    later = open_admin_socket(at, 1)
    admin.remove()
    assert at.is_socket()
    later.remove()


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        open_admin_socket(tmp_path / ("x" * 120), 1)


def test_missing_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    opened = open_admin_socket(tmp_path / "a" / "b" / "router.sock", 1)
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700 for name in ("a", "a/b"))
    opened.remove()
