"""S3, and servers that speak its protocol, through obstore (Rust, which works without the GIL).

Requests: GetObject, HeadObject, PutObject (with If-None-Match for the record), ListObjectsV2 and
DeleteObjects. Objects have no time of use, so what was written longest ago goes first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from disagg.errors import ConfigError
from disagg.object_urls import S3_INSTALL
from disagg.safe_logging import foreign
from disagg.store.objects.base import (
    DENIED,
    TIMEOUT,
    UNREACHABLE,
    Entry,
    Filling,
    StoreError,
    bad_certificate,
    other_host,
    unknown_authority,
)

if TYPE_CHECKING:
    from obstore.store import S3Store as Client

_THREADS = 16
_PIECE = 1 << 20
_DELETED_AT_ONCE = 1000
_REASONS = (
    (re.compile(r"kind: Timeout|TimedOut"), TIMEOUT),
    (re.compile(r"kind: (Connect|Request|Interrupted)|\bOs \{"), UNREACHABLE),
    (re.compile(r"status code: 40[13]|CredentialsError|no credentials", re.IGNORECASE), DENIED),
    (re.compile(r"status code: 404"), "no_bucket"),
    (re.compile(r"status code: (429|503)"), "busy"),
)
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")  # of rustls
_RETRIES = re.compile(r"(Generic S3 error: )|( after \d+ retries, max_retries: \d+, \S+: \S+ )")
T = TypeVar("T")


class S3Store:
    """The objects below a prefix of a bucket. credentials: `aws_*` values that replace those of the
    environment. Raises `ConfigError` if obstore is missing or refuses a value."""

    batch = _THREADS

    def __init__(
        self,
        bucket: str,
        prefix: str,
        place: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        credentials: Mapping[str, str] | None = None,
        ca_file: Path | None = None,
        connect_timeout_s: float = 2.0,
        timeout_s: float = 5.0,
    ) -> None:
        self.place = place
        self._host = (urlsplit(endpoint).hostname if endpoint else "") or "the host"
        values: dict[str, Any] = {"endpoint": endpoint, "region": region, **(credentials or {})}
        client: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=connect_timeout_s),
            "timeout": timedelta(seconds=timeout_s),
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
        }
        if ca_file is not None:
            client["root_certificate"] = ca_file.read_bytes()
        self._obstore, self._client = _open(
            bucket, prefix, {name: value for name, value in values.items() if value}, client
        )
        self._pool = ThreadPoolExecutor(_THREADS, "kv-s3")

    def put(self, name: str, pieces: Sequence[memoryview], *, only_new: bool = False) -> bool:
        views = [piece.cast("B") for piece in pieces if piece.nbytes]
        mode = "create" if only_new else "overwrite"

        def put() -> bool:
            try:
                self._obstore.put(self._client, name, views, mode=mode, use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return self._asked(put)

    def get(self, name: str, buffers: Sequence[memoryview]) -> int | None:
        def get() -> int | None:
            try:
                result = self._obstore.get(self._client, name)
            except FileNotFoundError:
                return None
            size = int(result.meta["size"])
            if size != sum(buffer.nbytes for buffer in buffers):
                return size
            filling = Filling(buffers)
            for piece in result.stream(min_chunk_size=_PIECE):
                filling.add(memoryview(piece))
            if not filling.is_full:
                raise StoreError("size", "fewer bytes came than were announced")
            return size

        return self._asked(get)

    def fetch(self, name: str, limit: int) -> bytes | None:
        def fetch() -> bytes | None:
            try:
                result = self._obstore.get(self._client, name)
            except FileNotFoundError:
                return None
            if result.meta["size"] > limit:
                raise StoreError("size", f"an object of more than {limit} bytes")
            return bytes(result.bytes())

        return self._asked(fetch)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        try:
            return [*self._pool.map(self._size, names)]
        except RuntimeError as error:
            raise StoreError("closed", str(error)) from error

    def touch(self, names: Sequence[str]) -> None:
        """Nothing: only a copy would change an object's time."""

    def remove(self, names: Sequence[str]) -> None:
        def remove(some: list[str]) -> None:
            try:
                self._obstore.delete(self._client, some)
            except FileNotFoundError:
                return

        left = iter(names)
        while some := [*itertools.islice(left, _DELETED_AT_ONCE)]:
            self._asked(partial(remove, some))

    def entries(self) -> Iterator[Entry]:
        pages = iter(self._asked(lambda: self._obstore.list(self._client)))
        while (page := self._asked(lambda: next(pages, None))) is not None:
            for found in page:
                at = found["last_modified"].timestamp()
                yield Entry(found["path"], int(found["size"]), at)

    def unlimited(self) -> str:
        return ""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- inside ----------------------------------------------------------------------------

    def _size(self, name: str) -> int | None:
        def size() -> int | None:
            try:
                return int(self._obstore.head(self._client, name)["size"])
            except FileNotFoundError:
                return None

        return self._asked(size)

    def _asked(self, ask: Callable[[], T]) -> T:
        """Every failure as a `StoreError`."""
        try:
            return ask()
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - obstore's errors have no common base
            raise self._store_error(error) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust; pyo3 names it nowhere
                raise
            raise StoreError("client", _message(error)) from None

    def _store_error(self, error: Exception) -> StoreError:
        found = _CERTIFICATE.search(str(error))
        if found is None:
            return StoreError(_reason(error), _message(error))
        if found[1].startswith("NotValidForName"):
            return other_host(self._host, "endpoint")
        return unknown_authority() if found[1] == "UnknownIssuer" else bad_certificate(found[1])


def _open(
    bucket: str, prefix: str, values: Mapping[str, str], client: Mapping[str, Any]
) -> tuple[Any, Client]:
    """The module obstore, and a client."""
    try:
        import obstore
        from obstore.store import S3Store as Client
    except ImportError as error:
        raise ConfigError(
            f"tiers.objects.url: s3 — obstore is not installed here; {S3_INSTALL}"
        ) from error
    retry: Any = {"max_retries": 1, "retry_timeout": client["timeout"]}
    try:
        made = Client(
            bucket,
            prefix=prefix or None,
            client_options=client,  # type: ignore[arg-type]
            retry_config=retry,
            **values,  # type: ignore[arg-type]
        )
    except Exception as error:  # noqa: BLE001 - as above
        raise ConfigError(f"tiers.objects: {type(error).__name__} — {_message(error)}") from None
    return obstore, made


def _reason(error: Exception) -> str:
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return DENIED
    text = str(error)
    return next((reason for pattern, reason in _REASONS if pattern.search(text)), "io")


def _message(error: BaseException) -> str:
    """One line, without the details of Rust that follow a line end."""
    return foreign(_RETRIES.sub("", str(error).split("\n", 1)[0]))
