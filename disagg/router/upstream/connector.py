"""A connection pool that never reuses a connection with unread bytes.

An engine may send bytes after the end of its answer. The next request on that connection would
take them for its own answer. In the worst case one client would get another client's answer.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp.connector import Connection


class Connector(aiohttp.TCPConnector):
    """aiohttp's connector, which by itself only checks that an idle connection is open."""

    async def _get(self, *args: Any, **options: Any) -> Connection | None:
        while (connection := await super()._get(*args, **options)) is not None:
            protocol = connection.protocol
            if protocol is not None and not protocol.should_close:
                return connection
            connection.close()
        return None
