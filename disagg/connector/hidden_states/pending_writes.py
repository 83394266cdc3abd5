"""A writer's pending writes, as kernel locks: readers sleep until a write ends or the writer dies.

A writer has one lock file per life. It locks byte `number` before a request's path can be known,
until the request's file or error file is complete; byte 0 for its whole life. These are
open-file-description locks: the kernel releases them when the process ends, however it ends. A
request costs one system call and no file, so it cannot fail for lack of space or descriptors.

The file is empty; locks may be beyond its end.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path
from typing import ClassVar

from disagg.connector.hidden_states import naming
from disagg.private_files import PrivateFolder, open_regular

_LIFE = 0
# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")


class PendingWrites:
    """The writer's side. Thread-safe."""

    def __init__(self, folder: PrivateFolder, life: str) -> None:
        """Raises OSError if the folder can't be made, isn't ours, or its file system can't lock."""
        self._folder, self._name = folder, naming.lock_path(folder.path, life).name
        self._pending: set[int] = set()
        self._guard = threading.Lock()
        self._descriptors: list[int] = []
        self._open()

    def begin(self, number: int) -> None:
        """Make readers wait for this number from now on. Raises OSError."""
        with self._guard:
            # A cleanup of the folder may have removed the file that readers open.
            if not self._is_there():
                self._open()
            _set(self._descriptors[-1], fcntl.F_WRLCK, number)
            self._pending.add(number)

    def end(self, number: int) -> None:
        """Wake all readers that wait for this number."""
        with self._guard:
            self._pending.discard(number)
            for descriptor in self._descriptors:
                _set(descriptor, fcntl.F_UNLCK, number)

    def close(self) -> None:
        """End the life: wake all waiting readers, which then raise an error."""
        with self._guard:
            self._folder.remove(self._name)
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()

    def _open(self) -> None:
        """Open a lock file. Older ones stay open, since readers may wait on them."""
        make_folder(self._folder)
        # Other users' readers take read locks only, so they need no write permission.
        descriptor = self._folder.open_file(self._name, os.O_RDWR | os.O_CREAT)
        try:
            for number in (_LIFE, *self._pending):
                _set(descriptor, fcntl.F_WRLCK, number)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptors.append(descriptor)

    def _is_there(self) -> bool:
        try:
            with self._folder.opened() as folder:
                found = os.stat(self._name, dir_fd=folder, follow_symlinks=False)
            return os.path.samestat(found, os.fstat(self._descriptors[-1]))
        except OSError:
            return False


def make_folder(folder: PrivateFolder) -> None:
    """Create the folder if missing, for this user only. To share it, create it beforehand, so that
    others may read it. Raises OSError, also if others may change it."""
    folder.create()


class Waiting:
    """A thread that sleeps in the kernel until one byte is unlocked, or its writer ends."""

    _all: ClassVar[dict[tuple[int, ...], Waiting]] = {}
    _guard: ClassVar = threading.Lock()

    def __init__(self, key: tuple[int, ...], descriptor: int, number: int) -> None:
        self._key, self._descriptor, self._number = key, descriptor, number
        self.done = threading.Event()
        self.error: OSError | None = None

    @classmethod
    def on(cls, descriptor: int, number: int) -> Waiting:
        """This process's only thread for this byte; takes ownership of the descriptor."""
        status = os.fstat(descriptor)
        # A forked child has its parent's entries, but not its threads.
        key = (os.getpid(), status.st_dev, status.st_ino, number)
        with cls._guard:
            known = cls._all.get(key)
            if known is not None:
                os.close(descriptor)
                return known
            waiting = cls._all[key] = cls(key, descriptor, number)
        name = f"disagg-hidden-states-{number}"
        threading.Thread(target=waiting._run, name=name, daemon=True).start()
        return waiting

    def _run(self) -> None:
        try:
            _set(self._descriptor, fcntl.F_RDLCK, self._number, wait=True)
        except OSError as error:
            self.error = error
        finally:
            with self._guard:
                del self._all[self._key]
            os.close(self._descriptor)
            self.done.set()


def wait(lock: Path, number: int, timeout: float | None) -> bool:
    """Sleep until this write or its writer ended; False if `timeout` seconds passed first.

    Raises FileNotFoundError or NotADirectoryError if there is no such writer any more.
    """
    descriptor = open_regular(lock)
    try:
        _set(descriptor, fcntl.F_RDLCK, number)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise
    else:
        os.close(descriptor)
        return True
    waiting = Waiting.on(descriptor, number)
    if not waiting.done.wait(timeout):
        return False
    if waiting.error is not None:
        raise waiting.error
    return True


def is_alive(lock: Path) -> bool:
    """Whether the writer of this lock file is alive."""
    try:
        descriptor = open_regular(lock)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _LIFE, 1, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    finally:
        os.close(descriptor)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def sweep(folder: PrivateFolder) -> None:
    """Remove the lock files and incomplete files of lives that ended without cleanup."""
    names = folder.names()
    for life in filter(None, map(naming.life_of, names)):
        lock = naming.lock_path(folder.path, life)
        if is_alive(lock):
            continue
        for name in names:
            if naming.life_of_temporary(name) == life:
                folder.remove(name)
        folder.remove(lock.name)


def _set(descriptor: int, kind: int, number: int, *, wait: bool = False) -> None:
    """Lock or unlock one byte. Raises OSError, EAGAIN if it is locked otherwise."""
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
