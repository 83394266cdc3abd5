"""All transports, in order of preference. Imports nothing of ours."""

from __future__ import annotations

from typing import Literal, get_args

TransportName = Literal["cuda_ipc", "nccl", "process_memory", "tcp", "shared_storage"]

PREFERENCE: tuple[TransportName, ...] = get_args(TransportName)
