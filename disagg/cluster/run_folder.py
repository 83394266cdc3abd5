"""Folders of one run: for handoff files, and for a private Ray.

Each folder holds a file that its process locks. A folder whose lock is free was left by a run that
was killed, and the next run removes it. Must never remove a folder whose process lives, nor one of
another host, because a shared file system's locks may not work across hosts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

from disagg.errors import ConfigError

LOCK = ".owner"


class RunFolder:
    """A folder of this process, locked until `remove` or the process's end."""

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / name
        try:
            self.path.mkdir(mode=0o700, parents=True)
            self._lock = (self.path / LOCK).open("w")
        except OSError as error:
            raise ConfigError(
                f"transfer.storage.path: cannot create {self.path}: {error}"
            ) from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(socket.gethostname())
        self._lock.flush()

    def remove(self) -> None:
        """Remove the folder with its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def user_folder() -> Path:
    """This user's folder in the temporary directory.

    Raises ConfigError if another user created it.
    """
    path = Path(tempfile.gettempdir(), f"disagg-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise ConfigError(f"{path}: belongs to another user; remove it or set TMPDIR")
    return path


def sweep(parent: Path) -> None:
    """Remove the folders of runs that were killed on this host."""
    for lock in parent.glob(f"*/{LOCK}"):
        if _abandoned(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)


def _abandoned(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An empty file is new: its process is about to lock it and write the host's name.
            return file.read() == socket.gethostname()
    except OSError:  # locked, or gone meanwhile
        return False


class PortLock:
    """Prevents that two deployments of one user start on the same port.

    The router listens only when the engines are ready. Until then, about a minute, both could bind
    the port.
    """

    def __init__(self, port: int) -> None:
        self._path = user_folder() / f"port-{port}"
        self._file = self._path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"router.port: {port} is taken by another `disagg serve`; stop it or choose "
                "another port (0 takes any free one)"
            ) from error

    def release(self) -> None:
        """Release the lock."""
        self._path.unlink(missing_ok=True)
        self._file.close()
