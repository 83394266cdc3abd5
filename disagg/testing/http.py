"""One HTTP client for all requests of a thread.

httpx's functions make a client each, which reads the system's certificates: 35 ms of a core, with
the GIL held, more than much of what is measured here; all other clients wait for it. So they are
read once. A client for all threads would not do: httpcore may give one thread the connection that
another one is just closing, and its request fails with EBADF (one in a few thousand).
"""

from __future__ import annotations

import functools
import ssl
import threading

import httpx

_of_thread = threading.local()


def client() -> httpx.Client:
    """This thread's own. Keeps no connection: engines that end are asked, too."""
    if not hasattr(_of_thread, "client"):
        limits = httpx.Limits(max_keepalive_connections=0)
        _of_thread.client = httpx.Client(verify=_certificates(), limits=limits)
    own: httpx.Client = _of_thread.client
    return own


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
