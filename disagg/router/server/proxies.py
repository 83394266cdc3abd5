"""Who the client is when a proxy or load balancer stands in front of the router.

Only a peer in a trusted network is believed, and only the one header that the settings name: a
client can send either, and a proxy replaces only its own. The last address that is not a proxy's is
the client's; what stands before it may be invented.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from disagg.config import ProxiesSection

_FORWARDED, _FOR, _PROTO = b"forwarded", b"x-forwarded-for", b"x-forwarded-proto"
_SCHEMES = ("http", "https")
_MOST_ADDRESSES = 4096  # that are remembered, since most come again
_LONGEST_REMEMBERED = 256  # bytes of the headers of one request
# `for=192.0.2.1`, `for="[2001:db8::1]:4711"`, and other pairs of RFC 7239.
_PAIR = re.compile(r'\s*([A-Za-z]+)\s*=\s*("[^"]*"|[^\s;,"]*)\s*')
Headers = Iterable[tuple[bytes, bytes]]
Said = tuple[str | None, str | None]
"""The client's address and its scheme, if they are known."""
Address = IPv4Address | IPv6Address
Hop = tuple[Address | None, str | None]
"""A sender as the next proxy saw it: its address and its scheme, if they are known."""


class TrustedProxies:
    """The proxies of one router."""

    def __init__(self, section: ProxiesSection) -> None:
        self._networks = [ip_network(network) for network in section.networks]
        self._is_trusted = lru_cache(_MOST_ADDRESSES)(self._is_in_networks)
        is_standard = section.header == "forwarded"
        self._hops = _forwarded if is_standard else _x_forwarded
        self._names = (_FORWARDED,) if is_standard else (_FOR, _PROTO)
        self._remembered = lru_cache(_MOST_ADDRESSES)(self._client)

    def trusts(self, address: str) -> bool:
        """Whether a peer with this address is a trusted proxy."""
        found = _address(address)
        return found is not None and self._is_trusted(found)

    def client(self, headers: Headers) -> Said:
        """The client's address and the scheme that it used, as far as a trusted proxy says so.
        `headers`: names in lower case."""
        sent = tuple([header for header in headers if header[0] in self._names])
        if sum([len(value) for _, value in sent]) > _LONGEST_REMEMBERED:
            return self._client(sent)
        return self._remembered(sent)

    def _client(self, headers: tuple[tuple[bytes, bytes], ...]) -> Said:
        hops = self._hops(headers)
        client: Hop = (None, None)
        for hop in reversed(hops):
            if hop[0] is None:
                break  # unknown or hidden; what stands before it proves nothing
            client = hop
            if not self._is_trusted(hop[0]):
                break
        address, scheme = client
        if scheme is None and hops:
            scheme = hops[-1][1]
        return None if address is None else str(address), scheme

    def _is_in_networks(self, address: Address) -> bool:
        return any(address in network for network in self._networks)


def _x_forwarded(headers: Headers) -> list[Hop]:
    addresses, schemes = list[str](), list[str]()
    for name, value in headers:
        if name == _FOR:
            addresses += value.decode("latin-1").split(",")
        elif name == _PROTO:
            schemes += value.decode("latin-1").split(",")
    if not addresses:
        addresses = [""]
    if len(schemes) != len(addresses):  # each proxy adds to the first, and most replace the second
        schemes = [schemes[-1] if schemes else ""] * len(addresses)
    return [(_address(a), _scheme(s)) for a, s in zip(addresses, schemes, strict=True)]


def _forwarded(headers: Headers) -> list[Hop]:
    hops = list[Hop]()
    for name, value in headers:
        if name != _FORWARDED:
            continue
        for element in value.decode("latin-1").split(","):
            pairs = {key.lower(): text.strip('"') for key, text in _PAIR.findall(element)}
            hops.append((_address(pairs.get("for", "")), _scheme(pairs.get("proto", ""))))
    return hops


@lru_cache(_MOST_ADDRESSES)
def _address(text: str) -> Address | None:
    """An address without its port."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def _scheme(text: str) -> str | None:
    scheme = text.strip().lower()
    return scheme if scheme in _SCHEMES else None
