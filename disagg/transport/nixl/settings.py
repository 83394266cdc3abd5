"""The settings of the transport. Imports nothing of ours, and not NIXL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util

PACKAGES = ("nixl_cu13", "nixl_cu12")
INSTALL = "pip install nixl-cu13==1.5.1 (59 MB)"


@dataclass(frozen=True)
class NixlSettings:
    """backend, params: NIXL's plugin and what it is given, on top of `library.params`.

    num_threads: the plugin's own threads, in each worker; 0: none. tcp: whether blocks may also go
    over UCX's TCP: there a consumer that dies or gives up can end the producer's process.
    """

    backend: str = "UCX"
    params: Mapping[str, str] = field(default_factory=dict)
    num_threads: int = 0
    tcp: bool = False


def is_installed() -> bool:
    """Whether one of NIXL's packages is installed. Imports none."""
    return any(util.find_spec(name) is not None for name in PACKAGES)
