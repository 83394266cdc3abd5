"""Connections to engines that are used again, and when they must not be.

An engine that says more than it was asked leaves its surplus on the connection, where the next
request would take it for its own answer: another client's, at worst.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp.connector import Connection


class Connector(aiohttp.TCPConnector):
    """aiohttp's, which by itself asks of an idle connection only whether it is open."""

    async def _get(self, *args: Any, **options: Any) -> Connection | None:
        while (connection := await super()._get(*args, **options)) is not None:
            protocol = connection.protocol
            if protocol is not None and not protocol.should_close:
                return connection
            connection.close()
        return None
