"""Lets processes of this user read our memory where Yama, a Linux security module, would not.

Where its ptrace_scope is 1, a process may be read by its ancestors and by one other that it names.
We name PR_SET_PTRACER_ANY: consumers are not known before they read, and there are several at once.
This gives this one process, while a transport needs it, what scope 0 gives to all; other users stay
shut out. Scopes 2 and 3 are left as they are: reads fail there, and who reads takes another way.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

from disagg.transport.host.process_vm import libc_function

logger = logging.getLogger(__name__)

_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class AllowedReaders:
    """Named from here until `close`, where that makes a difference."""

    def __init__(self) -> None:
        self._named = _scope() == 1 and _name()

    def close(self) -> None:
        """Name nobody any more."""
        if self._named:
            self._named = False
            _prctl(_PR_SET_PTRACER, ctypes.c_ulong(0))


def _name() -> bool:
    if _prctl(_PR_SET_PTRACER, _ANY) == 0:
        return True
    logger.info("cannot name readers to Yama: %s", os.strerror(ctypes.get_errno()))
    return False


def _prctl(option: int, value: ctypes.c_ulong) -> int:
    call = libc_function("prctl", ctypes.c_int, ctypes.c_int, *[ctypes.c_ulong] * 4)
    return -1 if call is None else call(option, value, 0, 0, 0)


def _scope() -> int:
    try:
        return int(_SCOPE.read_text())
    except (OSError, ValueError):
        return 0  # no Yama in this kernel
