"""Engines at all addresses of a DNS name, such as a headless service or a round-robin record.

`dns://HOST:PORT` is an engine at each address. A name with IPv4 addresses stands for these alone: a
host with addresses of both kinds is one engine. The system's resolver is asked anew every few
seconds, whatever the records' time to live.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from urllib.parse import urlsplit

from disagg.config import Role
from disagg.errors import ConfigError
from disagg.router.discovery.source import Report, SaidOnce, in_thread
from disagg.router.topology import EngineEndpoint, parse_endpoint

SCHEME = "dns://"
_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class DnsName:
    """`refresh_s`: between two look-ups. `keep_s`: for which an address stays that answers lack.
    `setting`: where the URL stands, for messages. Raises ConfigError for a wrong URL."""

    def __init__(self, role: Role, url: str, setting: str, refresh_s: float, keep_s: float) -> None:
        self._engine = parse_endpoint("", role, "http://" + url.removeprefix(SCHEME), setting)
        parts = urlsplit(self._engine.url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        if _is_address(self._host):
            raise ConfigError(f"{setting}: {self._host} is an address, no name; write http://")
        self._path = parts.path
        self.name = f"{role} {SCHEME}{self._host}:{self._port}{self._path}"
        self.roles = frozenset([role])
        self._refresh_s = refresh_s
        self._problems = SaidOnce(self.name)
        self._addresses = Addresses(keep_s)

    async def run(self, report: Report) -> None:
        """Report an engine for each address that the name has, or had until just now."""
        known: Collection[str] | None = None
        while True:
            try:
                found = await in_thread(lambda: resolve(self._host, self._port))
                now = self._addresses.seen(found)
                self._problems.over()
                if now != known:
                    report([self._at(address) for address in sorted(now)])
                    known = now
            except (OSError, UnicodeError) as error:
                self._problems.problem(f"look-up failed ({getattr(error, 'strerror', error)})")
            await asyncio.sleep(self._refresh_s)

    def _at(self, address: str) -> EngineEndpoint:
        host = f"[{address}]" if ":" in address else address
        return replace(self._engine, url=f"http://{host}:{self._port}{self._path}")


class Addresses:
    """The addresses of one name. One that answers lack stays for `keep_s`: servers may answer with
    a part of the addresses, another one each time."""

    def __init__(self, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._lacking_since: dict[str, float | None] = {}

    def seen(self, found: Collection[str]) -> frozenset[str]:
        """An answer has these addresses; returns those that count."""
        now, since = self._clock(), self._lacking_since
        for address in found:
            since[address] = None
        for address in since.keys() - set(found):
            began = since[address] = now if since[address] is None else since[address]
            assert began is not None
            if now - began >= self._keep_s:
                del since[address]
        return frozenset(since)


def resolve(host: str, port: int) -> frozenset[str]:
    """The addresses of a name; none if the name does not exist. Raises OSError if it is not known
    whether it does."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_SUCH_NAME:
            return frozenset()
        raise
    addresses = {str(address[0]) for *_, address in found}
    return frozenset(one for one in addresses if ":" not in one) or frozenset(addresses)


def _is_address(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True
