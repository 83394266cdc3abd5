"""Folders of one run: for handoff files, and for a private Ray.

A run's folder is named `<prefix><name>` and holds a record of its owner, which that process locks.
A guardian removes it when that process has ended in any way. A folder was left behind all the same
if its owner is known here to be dead and the lock is free; the next run removes it. Must never
remove a folder whose process lives, nor one of another host or container, nor anything that has
another name, no record of ours, or belongs to another user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from disagg.engine import guardian
from disagg.errors import ConfigError
from disagg.identity import process
from disagg.private_files import PrivateFolder, user_folder

LOCK = ".owner"
_MOST_BYTES = 256

Parent = Path | PrivateFolder
"""Where runs' folders are: a folder that others may share, or one of this user alone, which
protects what is within, whatever its mode."""


class RunFolder:
    """A folder of this process, locked until `remove` or the process's end."""

    def __init__(self, parent: Parent, prefix: str, name: str) -> None:
        """Raises ConfigError if it cannot be made."""
        self.folder = _within(parent, f"{prefix}{name}")
        self.path = self.folder.path
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)  # an existing one would be another's
            self._lock = self.folder.open_file(LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise ConfigError(
                f"transfer.storage.path: cannot create {self.path}: {error}"
            ) from error
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, process.name().encode())

    def guarded(self) -> RunFolder:
        """The same; from now on a process of its own removes it if this process is killed, as
        `ray job stop` does after three seconds."""
        guardian.spawn(self.path, folder_alone=True)
        return self

    def remove(self) -> None:
        """Remove the folder with its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(parent: Parent, prefix: str) -> None:
    """Remove the folders of runs that were killed on this host."""
    path = parent.path if isinstance(parent, PrivateFolder) else parent
    for found in path.glob(f"{prefix}*"):
        if _abandoned(_within(parent, found.name)):
            shutil.rmtree(found, ignore_errors=True)


def _within(parent: Parent, name: str) -> PrivateFolder:
    if isinstance(parent, PrivateFolder):
        return parent.enclosed(name)
    return PrivateFolder(parent / name)


def _abandoned(folder: PrivateFolder) -> bool:
    try:
        descriptor = folder.open_file(LOCK)  # the folder is ours alone, or this fails
    except OSError:
        return False
    with open(descriptor, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # its process lives
        # An empty record is new: its process is about to lock it and write its name.
        owner = file.read(_MOST_BYTES).decode(errors="replace")
    return process.is_dead(owner) is True


class PortLock:
    """Prevents that two deployments of one user start on the same port.

    The router listens only when the engines are ready. Until then, about a minute, both could bind
    the port.
    """

    def __init__(self, port: int) -> None:
        """Raises ConfigError if another deployment has the port, or this user's folder in the
        temporary directory is not this user's alone."""
        self._folder, self._name = user_folder().make("TMPDIR"), f"port-{port}"
        self._lock = self._folder.open_file(self._name, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"router.port: {port} is taken by another `disagg serve`; stop it or choose "
                "another port (0 takes any free one)"
            ) from error

    def release(self) -> None:
        """Release the lock."""
        self._folder.remove(self._name)
        with contextlib.suppress(OSError):
            os.close(self._lock)
