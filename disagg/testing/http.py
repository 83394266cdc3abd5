"""One HTTP client for all requests of a thread.

Each of httpx's functions makes a client, which reads the system's certificates: 35 ms of a core
with the GIL held, while all other clients wait. Many measured times are shorter, so the
certificates are read once. One client for all threads fails: httpcore may give a thread the
connection that another thread is closing, and the request fails with EBADF (one in a few
thousand).
"""

from __future__ import annotations

import functools
import ssl
import threading

import httpx

_of_thread = threading.local()
_TIMEOUT_S = 30.0  # httpx's own 5 s are too short for a busy machine


def client() -> httpx.Client:
    """This thread's client. It keeps no connection alive, because engines may end at any time."""
    if not hasattr(_of_thread, "client"):
        limits = httpx.Limits(max_keepalive_connections=0)
        _of_thread.client = httpx.Client(verify=_certificates(), limits=limits, timeout=_TIMEOUT_S)
    own: httpx.Client = _of_thread.client
    return own


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
