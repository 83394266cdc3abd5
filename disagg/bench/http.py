"""One HTTP client for all requests of a process.

httpx's functions make a client each, which reads the system's certificates: 35 ms of a core, with
the GIL held, more than much of what is measured here; all other clients wait for it.
"""

from __future__ import annotations

import functools

import httpx


@functools.cache
def client() -> httpx.Client:
    """May be used from any thread. Keeps no connection: engines that end are asked, too."""
    return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
