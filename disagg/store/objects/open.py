"""Opens the object store that a URL names, with its credentials."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import ConfigError
from disagg.object_urls import ObjectUrl, check_endpoint, check_options, parse_object_url
from disagg.private_files import read_own_file
from disagg.store.objects.base import ObjectStore, StoreError
from disagg.store.objects.guard import GuardedStore
from disagg.store.objects.mooncake import MooncakeStore
from disagg.store.objects.resp import Address
from disagg.store.objects.s3 import S3Store
from disagg.store.objects.space import ObjectSpace, OnRemoved
from disagg.store.objects.valkey import ValkeyStore

logger = logging.getLogger(__name__)

USER, PASSWORD = "VALKEY_USERNAME", "VALKEY_PASSWORD"
S3_BYTES = 64 << 30
"""The limit of a bucket's prefix, if none is set."""

_S3_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class ObjectOptions:
    """The settings of `tiers.objects` that concern the store."""

    url: str
    endpoint: str | None = None
    region: str | None = None
    max_bytes: int | None = None
    ttl_s: float | None = None
    connect_timeout_s: float = 2.0
    timeout_s: float = 5.0
    credentials_file: Path | None = None
    ca_file: Path | None = None


def open_store(options: ObjectOptions) -> GuardedStore:
    """The store, behind a circuit breaker; it need not answer now. Raises `ConfigError`."""
    try:
        url = parse_object_url(options.url)
    except ValueError as error:
        raise ConfigError(f"tiers.objects.url: {error}") from None
    try:
        check_options(url, vars(options))
    except ValueError as error:
        raise ConfigError(f"tiers.objects.{error}") from None
    try:
        if options.endpoint is not None:
            check_endpoint(options.endpoint)
    except ValueError as error:
        raise ConfigError(f"tiers.objects.endpoint: {error}") from None
    names = _S3_NAMES if url.kind == "s3" else (USER, PASSWORD)
    given = {} if options.credentials_file is None else _read(options.credentials_file, names)
    try:
        store = _OPEN[url.kind](url, options, given)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tiers.objects.ca_file: {str(options.ca_file)!r} — cannot be used ({error}); name a "
            "PEM file"
        ) from error
    return GuardedStore(store)


def space_of(
    options: ObjectOptions, store: ObjectStore, on_removed: OnRemoved | None = None
) -> ObjectSpace | None:
    """What limits the store's size; None where the server does, or should: see `_warn`."""
    kind = parse_object_url(options.url).kind
    if kind == "mooncake":
        return None
    if kind == "valkey":
        threading.Thread(target=_warn, args=(store,), name="kv-valkey-limit", daemon=True).start()
        return None
    return ObjectSpace(store, options.max_bytes or S3_BYTES, options.ttl_s, on_removed)


def _s3(url: ObjectUrl, options: ObjectOptions, given: dict[str, str]) -> ObjectStore:
    return S3Store(
        url.host,
        url.prefix,
        str(url),
        endpoint=options.endpoint,
        region=options.region,
        credentials={name.lower(): value for name, value in given.items()},
        ca_file=options.ca_file,
        connect_timeout_s=options.connect_timeout_s,
        timeout_s=options.timeout_s,
    )


def _valkey(url: ObjectUrl, options: ObjectOptions, given: dict[str, str]) -> ObjectStore:
    user, password = (
        given.get(name, "") if given else os.environ.get(name, "") for name in (USER, PASSWORD)
    )
    if user and not password:
        raise ConfigError(f"tiers.objects: {USER} is set, and {PASSWORD} is not; set both")
    address = Address(
        url.host,
        url.port,
        url.database,
        user,
        password,
        ssl.create_default_context(cafile=options.ca_file) if url.tls else None,
        options.connect_timeout_s,
    )
    return ValkeyStore(
        address, url.prefix, str(url), ttl_s=options.ttl_s, timeout_s=options.timeout_s
    )


def _mooncake(url: ObjectUrl, options: ObjectOptions, given: dict[str, str]) -> ObjectStore:
    address = f"{url.host}:{url.port}"
    return MooncakeStore(address, url.prefix, str(url), timeout_s=options.timeout_s)


_OPEN = {"s3": _s3, "valkey": _valkey, "mooncake": _mooncake}


def _warn(store: ObjectStore) -> None:
    """Say once if the server's memory may fill up: then nothing more is written."""
    try:
        problem = store.unlimited()
    except StoreError:
        return  # it is out, or the user may not ask
    if problem:
        logger.warning(
            "%s: %s, so nothing more is kept when its memory is full; set maxmemory, and "
            "maxmemory-policy allkeys-lru",
            store.place,
            problem,
        )


def _read(file: Path, names: tuple[str, ...]) -> dict[str, str]:
    """The file's lines NAME=VALUE. No message contains a value."""
    key = f"tiers.objects.credentials_file: {str(file)!r}"
    try:
        text = read_own_file(file.expanduser().absolute(), _MOST_BYTES).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{key} — is no text; write lines NAME=VALUE") from None
    except OSError as error:
        raise ConfigError(
            f"{key} — cannot be read ({error.strerror}); make it a file of this user, of mode 600"
        ) from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, value = (part.strip() for part in line.partition("="))
        if name not in names or not value:
            raise ConfigError(f"{key} — line {number} is none of {', '.join(names)}, with =VALUE")
        found[name] = value
    return found
