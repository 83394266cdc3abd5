"""What a writer still owes, told through the kernel: who waits sleeps, and a death is noticed.

A writer has one lock file per life. Byte `number` of it is locked from before a request's path
can be known until its file, or its error, has its name; byte 0 for the whole life. These are
open-file-description locks: the kernel drops them with the process, however it ends. A request
costs one system call and no file, and nothing that can fail for want of space or descriptors.

The file is empty; locks may lie beyond its end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
from pathlib import Path
from typing import ClassVar

from disagg.connector.hidden_states import naming

_LIFE = 0
# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")


class PendingWrites:
    """The writer's side. Thread-safe."""

    def __init__(self, folder: Path, life: str) -> None:
        """Raises OSError if the folder can't be made or its file system can't lock."""
        self._folder, self._path = folder, naming.lock_path(folder, life)
        self._owed: set[int] = set()
        self._guard = threading.Lock()
        self._descriptors: list[int] = []
        self._open()

    def make(self, number: int) -> None:
        """From now on readers wait for this number. Raises OSError if they can't be made to."""
        with self._guard:
            # Whoever tidied the folder up took the file that readers look for.
            if not self._is_there():
                self._open()
            _set(self._descriptors[-1], fcntl.F_WRLCK, number)
            self._owed.add(number)

    def keep(self, number: int) -> None:
        """Wakes all who wait for this number."""
        with self._guard:
            self._owed.discard(number)
            for descriptor in self._descriptors:
                _set(descriptor, fcntl.F_UNLCK, number)

    def close(self) -> None:
        """End of the life: wakes all who wait still, to an error."""
        with self._guard:
            with contextlib.suppress(OSError):
                self._path.unlink()
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()

    def _open(self) -> None:
        """Older lock files stay open: somebody may wait on them."""
        make_folder(self._folder)
        # Readers of another user lock for reading alone, so they need no more than that.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            for number in (_LIFE, *self._owed):
                _set(descriptor, fcntl.F_WRLCK, number)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptors.append(descriptor)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptors[-1]))
        except OSError:
            return False


def make_folder(folder: Path) -> None:
    """If it isn't there: for this user alone. Whose folder others may read makes it himself."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


class Waiting:
    """A thread asleep in the kernel until one byte is free; ends with the writer at the latest."""

    _all: ClassVar[dict[tuple[int, ...], Waiting]] = {}
    _guard: ClassVar = threading.Lock()

    def __init__(self, key: tuple[int, ...], descriptor: int, number: int) -> None:
        self._key, self._descriptor, self._number = key, descriptor, number
        self.done = threading.Event()
        self.error: OSError | None = None

    @classmethod
    def on(cls, descriptor: int, number: int) -> Waiting:
        """The one thread of this process for this byte; takes the descriptor over."""
        status = os.fstat(descriptor)
        # A forked child has the entries of its parent, but not the threads.
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
    """Sleep until the writer kept this promise or ended; False if `timeout` seconds passed first.

    Raises FileNotFoundError or NotADirectoryError if there is no such writer any more.
    """
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
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
    """Whether the life that this lock file belongs to goes on."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _LIFE, 1, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    finally:
        os.close(descriptor)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def sweep(folder: Path) -> None:
    """Remove lock files and half-written files of lives that ended without tidying up."""
    for lock in folder.glob(naming.LOCK_GLOB):
        life = naming.life_of(lock)
        if life is None or is_alive(lock):
            continue
        for path in (*naming.temporary_paths(folder, life), lock):
            with contextlib.suppress(OSError):
                path.unlink()


def _set(descriptor: int, kind: int, number: int, *, wait: bool = False) -> None:
    """Lock or unlock one byte. Raises OSError, EAGAIN if it is locked otherwise."""
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
