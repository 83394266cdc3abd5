"""Makes a connection fail when the host at its other end has disappeared.

When a process dies, its kernel closes its connections, and the peer's wait ends. A host that loses
power or network sends nothing. Then TCP by itself waits for hours, or for a quarter of an hour if
sent data is not acknowledged. A stopped or busy process does not make its connection fail: its
kernel still answers.
"""

from __future__ import annotations

import socket

SILENT_S = 5
_IDLE_S, _EACH_S = 2, 1


def watch(sock: socket.socket) -> None:
    """From now on, a wait on this connection fails with `ETIMEDOUT` in two cases: the other host
    sent nothing for `SILENT_S`, or a process there read nothing of the sent data for that long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EACH_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENT_S - _IDLE_S) // _EACH_S)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only: the same limit for unacknowledged data
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
