"""The one address a worker listens on, given as an address, a host name or a network interface.

It never listens on all addresses: KV blocks move only over the configured network, and peers
connect to the same address.
"""

from __future__ import annotations

import ipaddress
import socket

from disagg.errors import ConfigError

# Connections that the kernel completes and holds. Beyond it a client waits a second or longer, so
# it is net.core.somaxconn's default; the kernel takes its own value where that is smaller.
_BACKLOG = 4096


def resolve_host(host: str) -> str:
    """The one numeric address that `host` means, link-local ones with their `%interface`.

    An interface's IPv4 address comes before its IPv6 ones. Raises `ConfigError` for an unknown name
    and for a wildcard.
    """
    address = _of_interface(host) or _of_name(host)
    if not _is_one_address(address):
        raise ConfigError(f"host {host!r} is not one address: name an address or an interface")
    return address


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on exactly one address. Raises `OSError`, `ConfigError`."""
    found = socket.getaddrinfo(resolve_host(host), port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    # Else a worker that starts again would wait for its port: connections that this side closed
    # first last for a minute. Two workers can still not listen on one port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _of_interface(name: str) -> str | None:
    if name not in (known for _, known in socket.if_nameindex()):
        return None
    # Only needed for interface names, so it need not be installed otherwise.
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [a.address for a in psutil.net_if_addrs().get(name, ()) if a.family in families]
    if not addresses:
        raise ConfigError(f"network interface {name!r} has no address")
    return min(addresses, key=_rank)


def _rank(address: str) -> tuple[bool, bool]:
    parsed = ipaddress.ip_address(address)
    return parsed.version == 6, parsed.is_link_local


def _of_name(host: str) -> str:
    if not host:
        raise ConfigError("host is empty: name an address or an interface")
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r} is no address, host name or network interface of this machine: {error}"
        ) from error
    numeric = str(address[0])
    if len(address) == 4 and address[3]:
        return f"{numeric}%{socket.if_indextoname(address[3])}"
    return numeric


def _is_one_address(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return not (parsed.is_unspecified or parsed.is_multicast)
