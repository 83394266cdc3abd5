"""The router's own Unix socket (`router.admin_socket`). Every request at it is an operator's.

The file rights are its only protection: mode 0600, in a folder of this user with mode 0700. It must
never be opened in another folder, and never replace a file that is not a socket of this user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from pathlib import Path

from disagg.errors import ConfigError
from disagg.private_files import PrivateFolder
from disagg.router.server.api_keys import SocketPeer

_BACKLOG = 64
_LONGEST_PATH = 107  # bytes, of a Unix socket's address
_UCRED = struct.Struct("3i")  # pid, uid, gid


class AdminSocket:
    """A listening socket, and its file until `remove`."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self.socket, self.path = sock, path
        self._made = _identity(path)

    def remove(self) -> None:
        """Stop listening and remove the file, unless another router has replaced it."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if _identity(self.path) == self._made:
                self.path.unlink()


def open_admin_socket(path: Path, port: int) -> AdminSocket:
    """Listen at this path, in which `{port}` stands for the router's port; makes its folder if
    there is none. Raises ConfigError."""
    path = _path_for(path, port)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise _problem(path, f"longer than {_LONGEST_PATH} bytes; choose a shorter path")
    PrivateFolder(path.parent.absolute()).make("router.admin_socket")
    try:
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(str(path))
            path.chmod(0o600)  # until now the folder's mode protects it
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            return AdminSocket(sock, path)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise _problem(path, f"{error.strerror}; choose another path") from error


def remove_left(path: Path, port: int) -> None:
    """Remove the socket's file of a router on this host that was killed."""
    path = _path_for(path, port)
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid():
            path.unlink()


def _path_for(path: Path, port: int) -> Path:
    return Path(str(path).replace("{port}", str(port)))


def peer_of(sock: socket.socket) -> SocketPeer:
    """The process at the other end of a connection, as it was when it connected."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return SocketPeer(pid, uid)


def may_operate(peer: SocketPeer) -> bool:
    """Whether this peer is of the router's user, or root. The file's mode lets in no other; this
    holds also if somebody has changed the mode."""
    return peer.uid in (os.geteuid(), 0)


def _remove_stale(path: Path) -> None:
    """Remove the socket of a router that was killed. Raises ConfigError if it is anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise _problem(path, "exists and is no socket of this user; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        problem = probe.connect_ex(str(path))
    if problem not in (errno.ECONNREFUSED, errno.ENOENT):
        raise _problem(path, "another router listens there; choose another path")
    path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _problem(path: Path, text: str) -> ConfigError:
    return ConfigError(f"router.admin_socket: {str(path)!r} — {text}")
