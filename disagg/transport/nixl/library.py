"""NIXL's library: found, loaded and set up when the transport is opened, never before.

What NIXL would do by default and must not do here: no listener of its own and no metadata server
(its metadata travels in our hello), no polling without a pause. With its progress thread's delay of
0, which NIXL's Python classes set, that thread takes a whole core even when idle. So this module
uses NIXL's bindings, where the delay can be set.
"""

from __future__ import annotations

import importlib
import os
import socket
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from disagg.errors import TransferError
from disagg.transport.nixl.settings import INSTALL, PACKAGES, NixlSettings

NAME = "nixl"
_RDMA = Path("/sys/class/infiniband")
# UCX's progress thread sleeps until an event of one of its connections, at most so long. Other
# plugins sleep between two looks.
_UCX_SLEEP_US, _SLEEP_US = 100_000, 1_000


class Library(NamedTuple):
    """The bindings, and the errors that they raise, which have no base of their own."""

    bindings: Any
    errors: tuple[type[Exception], ...]


def load(host: str) -> Library:
    """Load NIXL. host: the address that this worker's listeners bind to; UCX's shall, too. Raises
    `TransferError` if NIXL is not installed, or does not load here.
    """
    _set_environment(host)
    found = [name for name in PACKAGES if util.find_spec(name) is not None]
    if not found:
        raise TransferError(f"NIXL is not installed; {INSTALL}", reason=NAME)
    try:
        bindings = importlib.import_module(f"{found[0]}._bindings")
    except (ImportError, OSError) as error:
        raise TransferError(f"NIXL does not load: {error}", reason=NAME) from error
    own = [value for name, value in vars(bindings).items() if name.endswith("Error")]
    errors = (RuntimeError, ValueError, TypeError, *own)
    return Library(bindings, errors)


def has_rdma() -> bool:
    """Whether this host has a device for InfiniBand, RoCE or EFA."""
    return bool(_rdma_ports())


def params(settings: NixlSettings, workers: int = 1) -> dict[str, str]:
    """What the plugin is given."""
    given = dict(settings.params)
    if workers > 1:
        given.setdefault("num_workers", str(workers))
    if settings.num_threads:
        given.setdefault("num_threads", str(settings.num_threads))
    return given


def sleep_us(settings: NixlSettings) -> int:
    """How long the progress thread sleeps at most, in microseconds."""
    return _UCX_SLEEP_US if settings.backend == "UCX" else _SLEEP_US


def _set_environment(host: str) -> None:
    """UCX reads these variables when it is loaded. What the user has set stays."""
    # UCX asks nobody who connects for a secret, and by default it listens on all interfaces.
    if devices := _devices(host):
        os.environ.setdefault("UCX_NET_DEVICES", ",".join(devices))
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if not has_rdma():
        # The verbs libraries in NIXL's wheel end a process with SIGSEGV at its exit.
        os.environ.setdefault("UCX_MODULES", "^ib")


def _devices(host: str) -> list[str]:
    """The network interface that has this address, and all ports for RDMA. Empty: any."""
    import psutil  # here, as machines that only measure transports may lack it

    if host in ("", "0.0.0.0", "::"):
        return []
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return []
    found = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.address == address for one in addresses)
    ]
    return found and found + _rdma_ports()


def _rdma_ports() -> list[str]:
    return sorted(f"{path.parts[-3]}:{path.name}" for path in _RDMA.glob("*/ports/*"))
