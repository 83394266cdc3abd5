"""All transports, and the default order of preference. Imports nothing of ours.

The default order is without nixl: UCX, below it, authenticates nobody who reaches its ports. So it
has to be asked for.
"""

from __future__ import annotations

from typing import Literal, get_args

TransportName = Literal["cuda_ipc", "nccl", "nixl", "process_memory", "tcp", "shared_storage"]

TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)
PREFERENCE: tuple[TransportName, ...] = tuple(name for name in TRANSPORTS if name != "nixl")
