"""Sockets of servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from disagg.engine import server as engine_server
from disagg.router.server import server as router_server


@pytest.mark.parametrize("bind", [router_server.bind, engine_server.bind])
def test_small_writes_are_sent_at_once(bind: Callable[[str, int], socket.socket]) -> None:
    """Else a token waits up to 40 ms for the acknowledgement of the one before it."""

    async def test() -> None:
        accepted = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer)

        server = await asyncio.start_server(accept, sock=bind("127.0.0.1", 0))
        _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer = await accepted
        theirs = writer.get_extra_info("socket")
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for one in (client, writer):
            one.close()
        server.close()

    asyncio.run(test())
