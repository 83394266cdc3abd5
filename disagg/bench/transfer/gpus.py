"""Which GPU each end of `bench transfer --device cuda` uses, and NCCL's settings for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util

import torch

from disagg.errors import ConfigError


@dataclass(frozen=True)
class GpuPlace:
    """Where one end runs: torch's device name, and environment variables."""

    device: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """The places of both ends."""

    producer: GpuPlace
    consumer: GpuPlace
    shared: bool  # whether both use one device


# Both ends are on this machine.
_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}


def require() -> None:
    """Raise `ConfigError` if no GPU can be measured."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device: cuda — no GPU here that torch {torch.__version__} can use; use a machine "
            "with a GPU, or --device cpu"
        )
    if util.find_spec("cupy") is None:
        raise ConfigError("device: cuda — needs cupy: pip install disagg[gpu]")


def choose(device: str) -> Places:
    """GPU 0 and GPU 1, or both ends on the only GPU."""
    if device == "cpu":
        return Places(GpuPlace("cpu"), GpuPlace("cpu"), shared=True)
    if torch.cuda.device_count() > 1:
        return Places(GpuPlace("cuda:0", _LOOPBACK), GpuPlace("cuda:1", _LOOPBACK), shared=False)
    # NCCL refuses two ranks on one GPU unless their host ids differ. It then uses its network
    # transport, which on one machine is sockets.
    hosts = [_LOOPBACK | {"NCCL_HOSTID": f"disagg-bench-{end}"} for end in ("out", "in")]
    return Places(GpuPlace("cuda:0", hosts[0]), GpuPlace("cuda:0", hosts[1]), shared=True)
