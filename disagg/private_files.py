"""Folders and files that no other user may touch, and that no other user can put in our way.

A private folder belongs to this user, has mode 0700 and is no symlink. It is opened anew for every
use, checked, and its files are reached relative to that descriptor: whoever swaps a path meanwhile
changes nothing. A file is opened without blocking, never through a symlink, and must be a regular
file: a FIFO or a device in its place is refused at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from disagg.errors import ConfigError

Others = Literal["nothing", "read", "anything"]

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FORBIDDEN: dict[Others, int] = {"nothing": 0o077, "read": 0o022, "anything": 0}


class UnsafePathError(PermissionError):
    """A path is not ours alone. The message names it and the fix."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class PrivateFolder:
    """A folder of this user. parent: checked at every use, too.

    others: whether other users may `read` it, which only whoever made the folder decides; nobody
    else ever writes to it. `anything`: its mode does not matter, as its parent lets nobody in.

    default: disagg chose the path. Then `make` closes a folder that others may only read, which
    older versions left behind.
    """

    path: Path
    others: Others = "nothing"
    parent: PrivateFolder | None = None
    default: bool = False

    def make(self, setting: str) -> PrivateFolder:
        """Create the folder if missing, and check it. `setting`: for errors.

        Raises ConfigError if the folder cannot be made, or is not ours alone.
        """
        try:
            return self.create()
        except UnsafePathError as error:
            raise ConfigError(f"{setting}: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"{setting}: {str(self.path)!r} — cannot be used ({error.strerror}); name a folder "
                "of your own"
            ) from error

    def create(self) -> PrivateFolder:
        """As `make`, but raises OSError."""
        if self.parent is not None:
            self.parent.create()
        _make_folders(self.path)
        if self.default:
            _close(self.path)
        with self.opened():
            return self

    def sub(self, name: str) -> PrivateFolder:
        """A private folder within this one."""
        return PrivateFolder(self.path / name, self.others, self)

    def enclosed(self, name: str) -> PrivateFolder:
        """A folder within this one whose mode another program, such as Ray, may change."""
        if self.others != "nothing":
            raise ValueError(f"{self.path} is open")
        return PrivateFolder(self.path / name, "anything", self)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The folder's descriptor. Raises OSError; UnsafePathError if the folder is not ours."""
        descriptor = self._open()
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """The descriptor of a regular file in this folder. A new one may be read by those who may
        read the folder. Raises OSError."""
        with self.opened() as folder:
            shared = os.fstat(folder).st_mode & 0o044 if self.others == "read" else 0
            mode = 0o600 | shared
            return open_regular(name, flags, mode, folder)

    def read_bytes(self, name: str, limit: int) -> bytes:
        """The first `limit` bytes of a file. Raises OSError."""
        with open(self.open_file(name), "rb") as file:
            return file.read(limit)

    def write_bytes(self, name: str, content: bytes) -> None:
        """Create this file, or replace its content. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(self.open_file(name, flags), "wb") as file:
            file.write(content)

    def rename(self, name: str, to: str) -> None:
        """Raises OSError."""
        with self.opened() as folder:
            os.rename(name, to, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str) -> bool:
        """Unlink a file. Returns whether it is gone because of this call."""
        with contextlib.suppress(OSError), self.opened() as folder:
            os.unlink(name, dir_fd=folder)
            return True
        return False

    def names(self) -> list[str]:
        """All entries. Raises OSError."""
        with self.opened() as folder:
            return sorted(os.listdir(folder))

    def _open(self) -> int:
        if self.parent is None:
            descriptor = _open_folder(self.path)
        else:
            with self.parent.opened() as folder:
                descriptor = _open_folder(self.path, folder)
        problem = _problem(os.fstat(descriptor), self.others)
        if problem:
            os.close(descriptor)
            raise UnsafePathError(f"{str(self.path)!r} — {problem}")
        return descriptor


def user_folder() -> PrivateFolder:
    """This user's folder in the system's temporary folder. It may be missing: see `make`."""
    path = Path(tempfile.gettempdir(), f"disagg-{os.getuid()}").absolute()
    return PrivateFolder(path, default=True)


def folder_or_own(path: Path | None, name: str) -> PrivateFolder:
    """The configured folder, or else the one of this name in the user's folder."""
    return user_folder().sub(name) if path is None else PrivateFolder(path.expanduser().absolute())


def open_regular(
    name: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o600,
    folder: int | None = None,
) -> int:
    """The descriptor of a regular file. Raises OSError, at once for anything else.

    folder: the descriptor that `name` is relative to.
    """
    descriptor = os.open(name, flags | _OPEN_FILE, mode, dir_fd=folder)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise UnsafePathError(f"{os.fspath(name)!r} — is not a regular file; remove it")


def read_own_file(name: str | Path, limit: int, folder: int | None = None) -> bytes:
    """The first `limit` bytes of a file that only this user may read or write, such as a secret's.

    Raises OSError; UnsafePathError if the file is another user's, or other users may access it.
    """
    with open(open_regular(name, folder=folder), "rb") as file:
        problem = _problem(os.fstat(file.fileno()), "nothing", "600")
        if problem:
            raise UnsafePathError(f"{str(name)!r} — {problem}")
        return file.read(limit)


def _open_folder(path: Path, parent: int | None = None) -> int:
    try:
        if parent is None:
            return os.open(path, _OPEN_FOLDER)
        return os.open(path.name, _OPEN_FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise UnsafePathError(f"{str(path)!r} — is a symlink; name the folder itself") from None
        raise


def _close(path: Path) -> None:
    """Give a folder of this user mode 0700, unless others could have put something into it."""
    descriptor = _open_folder(path)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.getuid() and not found.st_mode & _FORBIDDEN["read"]:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _problem(found: os.stat_result, others: Others, mode: str = "700") -> str:
    """Why what was found is not ours alone; empty if it is."""
    if found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}, not to user {os.getuid()}; name one of your own"
    if found.st_mode & _FORBIDDEN[others]:
        verb = "change" if others == "read" else "read or change"
        return (
            f"has mode {stat.S_IMODE(found.st_mode):o}: other users may {verb} it; use one with "
            f"mode {mode} (chmod {mode})"
        )
    return ""


def _make_folders(path: Path) -> None:
    """Each missing folder of the path, for this user alone. `os.makedirs` would leave the upper
    ones open."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
