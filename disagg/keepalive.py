"""How a connection learns that the host at its other end is gone without a word.

A process that dies closes its connections, and whoever waits is told; a host that loses its power
or its network says nothing, and TCP by itself waits for hours, or a quarter of one for what it has
sent. Kernels answer for processes that are stopped or busy, so these are not taken for gone.
"""

from __future__ import annotations

import socket

SILENT_S = 5
_IDLE_S, _EACH_S = 2, 1


def watch(sock: socket.socket) -> None:
    """From now on, a wait on this connection ends with an error (`ETIMEDOUT`) when nothing came
    from the other host for `SILENT_S`, or a process there read nothing for so long of what is
    being sent to it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EACH_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENT_S - _IDLE_S) // _EACH_S)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: of what is on its way, too
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
