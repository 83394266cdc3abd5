"""Lets this user's processes read our memory where Yama, a Linux security module, forbids it.

With ptrace_scope 1, only a process's ancestors and one process that it names may read it. We name
PR_SET_PTRACER_ANY, because consumers are not known in advance and there are several. This process
then behaves as under scope 0 while a transport needs it; other users still cannot read it. Scopes 2
and 3 are not changed: reads fail there, and consumers use another transport.
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
    """Allows all readers from construction until `close`, if the scope requires it."""

    def __init__(self) -> None:
        self._permitted = _scope() == 1 and _permit()

    def close(self) -> None:
        """Withdraw the permission."""
        if self._permitted:
            self._permitted = False
            _prctl(_PR_SET_PTRACER, ctypes.c_ulong(0))


def _permit() -> bool:
    if _prctl(_PR_SET_PTRACER, _ANY) == 0:
        return True
    logger.info("cannot permit readers under Yama: %s", os.strerror(ctypes.get_errno()))
    return False


def _prctl(option: int, value: ctypes.c_ulong) -> int:
    call = libc_function("prctl", ctypes.c_int, ctypes.c_int, *[ctypes.c_ulong] * 4)
    return -1 if call is None else call(option, value, 0, 0, 0)


def _scope() -> int:
    try:
        return int(_SCOPE.read_text())
    except (OSError, ValueError):
        return 0  # no Yama in this kernel
