"""Ask the kernel for AMX tile state, which vLLM's CPU attention uses without asking."""

from __future__ import annotations

import ctypes
import platform


def ask_for_amx(device_type: str) -> None:
    """Ask the kernel for AMX tile state, if this is a CPU engine on x86-64 Linux.

    vLLM's CPU attention uses AMX without asking; a decode worker whose first forward pass is
    one token after a load then dies with SIGILL. Harmless where there is no AMX.
    """
    if device_type != "cpu" or platform.system() != "Linux" or platform.machine() != "x86_64":
        return
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request_permission, tile_data)
