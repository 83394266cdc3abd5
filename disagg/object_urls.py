"""Where an object store is: `s3://bucket/prefix`, `valkey://host:port/database/prefix`, or
`mooncake://master:port/prefix`.

Such a URL holds no password: it is shown in logs, in errors and by `disagg check`. So one with a
user or with parameters is refused, by a sentence that does not repeat it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, urlsplit

Kind = Literal["s3", "valkey", "mooncake"]

_KINDS: dict[str, tuple[Kind, bool]] = {
    "s3": ("s3", True),
    "valkey": ("valkey", False),
    "redis": ("valkey", False),
    "valkeys": ("valkey", True),
    "rediss": ("valkey", True),
    "mooncake": ("mooncake", False),
}
S3_INSTALL = "pip install 'disagg[s3]'"
MOONCAKE_INSTALL = (
    "pip install 'disagg[mooncake]', and Debian's libibverbs1 librdmacm1 libnuma1 libcurl4"
)
_PORT, _MOONCAKE_PORT = 6379, 50051
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True)
class ObjectUrl:
    """host: a server's, Mooncake's master's, or the bucket of S3. tls: of Valkey; with S3 the
    endpoint says it."""

    kind: Kind
    host: str
    prefix: str
    port: int = 0
    database: int = 0
    tls: bool = True

    def __str__(self) -> str:
        """As in logs."""
        if self.kind == "s3":
            return "/".join(["s3:/", self.host, *([self.prefix] if self.prefix else [])])
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.kind == "mooncake":
            return f"mooncake://{host}:{self.port}/{self.prefix}"
        scheme = "valkeys" if self.tls else "valkey"
        return f"{scheme}://{host}:{self.port}/{self.database}/{self.prefix}"


def parse_object_url(text: str) -> ObjectUrl:
    """Raises `ValueError` with a sentence that does not contain the URL."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        raise ValueError("is no URL; write s3://bucket/prefix or valkey://host:port/0") from None
    if parts.scheme not in _KINDS:
        raise ValueError(f"begins with none of {', '.join(f'{name}://' for name in _KINDS)}")
    kind, tls = _KINDS[parts.scheme]
    if "@" in parts.netloc:
        raise ValueError(
            "has a user or a password in it, and URLs are shown; remove both, and set "
            "credentials_file or the engines' environment"
        )
    if parts.query or parts.fragment:
        raise ValueError("has parameters behind a ? or a #; remove them")
    if kind == "s3":
        return _s3(parts, port)
    if kind == "mooncake":
        return _mooncake(parts, port)
    database, _, prefix = parts.path.strip("/").partition("/")
    if not parts.hostname:
        raise ValueError("names no host; write valkey://host:port/0")
    if database and not (database.isascii() and database.isdigit() and len(database) < 6):
        raise ValueError("has no number of a database behind the host; write valkey://host:port/0")
    return ObjectUrl(
        "valkey",
        parts.hostname,
        _prefix(prefix) or "disagg-kv",
        _PORT if port is None else port,
        int(database or 0),
        tls,
    )


def check_endpoint(endpoint: str) -> None:
    """Raises `ValueError` if this is no server's URL, or has a user in it."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("is no address of a server; write http(s)://host:port")


_NOT_WITH: dict[Kind, dict[str, str]] = {
    "s3": {},
    "valkey": {
        "max_bytes": "Valkey limits its size itself; remove it, and set the server's maxmemory, "
        "with maxmemory-policy allkeys-lru",
        "endpoint": "only S3 has one; remove it",
        "region": "only S3 has one; remove it",
    },
    "mooncake": {
        "max_bytes": "the memory that mooncake_client processes lend is the limit; remove it",
        "ttl_s": "Mooncake evicts what was not used, at no set time; remove it",
        "endpoint": "only S3 has one; remove it",
        "region": "only S3 has one; remove it",
        "credentials_file": "Mooncake asks for none; remove it, and let nobody else reach it",
        "ca_file": "Mooncake knows no certificates; remove it, and let nobody else reach it",
    },
}


def check_options(url: ObjectUrl, given: Mapping[str, object]) -> None:
    """`given`: the other settings by their keys; None: not set. Raises `ValueError`, which names
    the key, for what this kind of store does not take."""
    for name, why in _NOT_WITH[url.kind].items():
        if given.get(name) is not None:
            raise ValueError(f"{name}: {why}")


def _mooncake(parts: SplitResult, port: int | None) -> ObjectUrl:
    if not parts.hostname:
        raise ValueError("names no host; write mooncake://master:50051")
    prefix = _prefix(parts.path.strip("/")) or "disagg-kv"
    return ObjectUrl("mooncake", parts.hostname, prefix, port or _MOONCAKE_PORT, tls=False)


def _s3(parts: SplitResult, port: int | None) -> ObjectUrl:
    if port is not None or not _BUCKET.fullmatch(parts.netloc):
        raise ValueError(
            "names no bucket behind s3://; write s3://bucket/prefix, and the server in endpoint"
        )
    return ObjectUrl("s3", parts.netloc, _prefix(parts.path.strip("/")))


def _prefix(text: str) -> str:
    if text and (not _PREFIX.fullmatch(text) or {".", ".."} & {*text.split("/")}):
        raise ValueError("has a prefix of more than letters, digits, dots, dashes, _ and single /")
    return text
