from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.private_files import PrivateFolder, UnsafePathError, folder_or_own, user_folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_every_folder_on_the_way_is_made_for_this_user_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = PrivateFolder(tmp_path / "a" / "b" / "c").make("path")
    finally:
        os.umask(old)
    for path in (folder.path, *folder.path.parents[:2]):
        assert mode_of(path) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702, 0o1777, 0o710])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(mode)
    with pytest.raises(ConfigError, match=rf"a.key: .*x' — has mode {mode:o}: .*chmod 700"):
        PrivateFolder(tmp_path / "x").make("a.key")


def test_readers_are_let_in_only_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x").chmod(0o755)
    folder = PrivateFolder(tmp_path / "x", others="read").make("a.key")
    folder.write_bytes("file", b"")
    assert mode_of(folder.path / "file") == 0o644
    folder.path.chmod(0o700)
    folder.write_bytes("other", b"")
    assert mode_of(folder.path / "other") == 0o600
    folder.path.chmod(0o775)
    with pytest.raises(ConfigError, match="may change it"):
        folder.make("a.key")


def test_a_symlink_is_no_folder_of_ours(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is a symlink"):
        PrivateFolder(tmp_path / "link").make("a.key")
    with pytest.raises(ConfigError, match="is a symlink"):
        (PrivateFolder(tmp_path / "link").sub("within")).make("a.key")
    assert os.listdir(tmp_path / "real") == []


def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to give a folder away")
    (tmp_path / "x").mkdir(mode=0o700)
    os.chown(tmp_path / "x", 1234, 1234)
    with pytest.raises(ConfigError, match="belongs to user 1234, not to user 0"):
        PrivateFolder(tmp_path / "x").make("a.key")


def test_a_folder_is_checked_at_every_use(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "x").make("a.key")
    folder.write_bytes("file", b"content")
    uses: list[Callable[[], object]] = [
        lambda: folder.read_bytes("file", 9),
        lambda: folder.write_bytes("new", b""),
        lambda: folder.open_file("file"),
        lambda: folder.rename("file", "other"),
        folder.names,
    ]
    folder.path.chmod(0o777)
    for use in uses:
        with pytest.raises(UnsafePathError, match="has mode 777"):
            use()
    assert not folder.remove("file")
    folder.path.rename(tmp_path / "moved")
    (tmp_path / "moved").chmod(0o700)
    folder.path.symlink_to(tmp_path / "moved")
    for use in uses:
        with pytest.raises(UnsafePathError, match="is a symlink"):
            use()
    assert not folder.remove("file")
    assert (tmp_path / "moved" / "file").read_bytes() == b"content"


def test_only_regular_files_are_opened_and_at_once(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path / "x").make("a.key")
    os.mkfifo(folder.path / "fifo")
    (folder.path / "folder").mkdir()
    (folder.path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_bytes(b"precious")
    (folder.path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder.path / "socket"))
        began = time.monotonic()
        for name in ("fifo", "folder", "link", "device", "socket"):
            with pytest.raises(OSError):  # noqa: PT011 - of any kind
                folder.read_bytes(name, 9)
            with pytest.raises(OSError):  # noqa: PT011
                folder.write_bytes(name, b"changed")
        assert time.monotonic() - began < 5
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_the_default_is_a_folder_within_the_users(tmp_path: Path) -> None:
    assert folder_or_own(tmp_path / "given", "name") == PrivateFolder(tmp_path / "given")
    own = folder_or_own(None, "name").make("a.key")
    assert own.path == tmp_path / f"disagg-{os.getuid()}" / "name"
    own.path.parent.chmod(0o755)
    with pytest.raises(UnsafePathError, match="has mode 755"):
        own.write_bytes("file", b"")


def test_a_default_folder_that_an_older_version_left_open_is_closed(tmp_path: Path) -> None:
    folder = user_folder().make("a.key")
    folder.path.chmod(0o755)
    folder.make("a.key").write_bytes("file", b"")
    assert mode_of(folder.path) == 0o700
    folder.path.chmod(0o777)
    with pytest.raises(ConfigError, match="has mode 777"):
        folder.make("a.key")


def test_a_users_folder_that_was_planted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir(mode=0o700)
    user_folder().path.symlink_to(tmp_path / "planted")
    with pytest.raises(ConfigError, match="is a symlink"):
        user_folder().sub("handoffs").make("a.key")
    assert os.listdir(tmp_path / "planted") == []
