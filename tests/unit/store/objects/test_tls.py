"""Stores behind TLS: who trusts which certificate, and what an error says to do.

The wheel's Valkey is built without TLS, so it stands behind what speaks TLS for it. A server on the
PATH that has TLS is asked itself, too (Debian's redis-server).
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from authority import Authority, Certificate, tls_before
from object_servers import BUCKET, S3Server, Server, ValkeyServer, running_valkey
from unit.store.chunks import FINGERPRINT, SPEC, content_of, cut, empty, key_of

from disagg.store.objects.base import StoreError
from disagg.store.objects.open import ObjectOptions, open_store
from disagg.store.objects.tier import Objects

KEY = key_of(1)
OWN = next(filter(None, map(shutil.which, ("valkey-server", "redis-server"))), None)
KINDS = (
    "valkey",
    pytest.param("own", marks=pytest.mark.skipif(OWN is None, reason="no server with TLS")),
    "s3",
)


class Certificates(NamedTuple):
    """fits: for 127.0.0.1. other: for another host."""

    authority: Authority
    fits: Certificate
    other: Certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    fits = authority.sign("fits", "IP:127.0.0.1,DNS:localhost")
    return Certificates(authority, fits, authority.sign("other", "DNS:store.example"))


class OwnTls(ValkeyServer):
    """A server that speaks TLS itself, on its only port."""

    def __init__(self, log: Path, certificate: Certificate) -> None:
        super().__init__(log)
        self._certificate = certificate

    def command(self) -> Sequence[str]:
        cert, key = map(str, self._certificate)
        assert OWN is not None
        options = ("--save", "", "--bind", "127.0.0.1", "--tls-auth-clients", "no")
        tls = ("--tls-port", str(self.port), "--tls-cert-file", cert, "--tls-key-file", key)
        return [OWN, "--port", "0", *tls, *options]

    def is_ready(self) -> bool:
        return _listens(self.port)


class S3WithTls(S3Server):
    def __init__(self, log: Path, certificate: Certificate) -> None:
        super().__init__(log)
        self.endpoint = f"https://127.0.0.1:{self.port}"
        self._certificate = certificate

    def command(self) -> Sequence[str]:
        cert, key = map(str, self._certificate)
        return [*super().command(), "-c", cert, "-k", key]

    def is_ready(self) -> bool:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with contextlib.suppress(httpx.HTTPError):
            made = httpx.put(f"{self.endpoint}/{BUCKET}", verify=context, timeout=5)
            return made.status_code in (200, 409)
        return False


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def started(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def served(kind: str, certificate: Certificate, folder: Path) -> Iterator[ObjectOptions]:
    """Where a server with this certificate is."""
    if kind == "s3":
        with started(S3WithTls(folder / "log", certificate)) as server:
            assert isinstance(server, S3WithTls)
            yield ObjectOptions(server.url, endpoint=server.endpoint, region="us-east-1")
    elif kind == "own":
        with started(OwnTls(folder / "log", certificate)) as server:
            yield ObjectOptions(f"rediss://127.0.0.1:{server.port}/0/test")
    else:
        with (
            running_valkey(folder / "log") as server,
            tls_before(server.port, certificate) as port,
        ):
            yield ObjectOptions(f"rediss://127.0.0.1:{port}/0/test")


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")


def refusal(options: ObjectOptions) -> tuple[str, str]:
    store = open_store(options)
    with contextlib.closing(store), pytest.raises(StoreError) as caught:
        store.sizes(["a"])
    return caught.value.reason, str(caught.value)


def trusting(options: ObjectOptions, authority: Authority) -> ObjectOptions:
    return ObjectOptions(options.url, options.endpoint, options.region, ca_file=authority.file)


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_of_an_authority_in_a_file(
    kind: str, certificates: Certificates, tmp_path: Path
) -> None:
    """With the file, chunks go there and back; without it, nothing is sent."""
    with served(kind, certificates.fits, tmp_path) as options:
        assert refusal(options) == (
            "certificate",
            "the server's certificate is signed by no authority that is trusted here; name a PEM "
            "file of that authority in tiers.objects.ca_file",
        )
        store = open_store(trusting(options, certificates.authority))
        tier = Objects(store, FINGERPRINT, 0, SPEC)
        assert tier.write(KEY, cut(content_of(KEY))).ok
        whole, buffers = empty()
        assert tier.read(KEY, buffers).ok
        assert bytes(whole) == content_of(KEY)
        tier.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_of_another_host(
    kind: str, certificates: Certificates, tmp_path: Path
) -> None:
    with served(kind, certificates.other, tmp_path) as options:
        key = "endpoint" if kind == "s3" else "url"
        assert refusal(trusting(options, certificates.authority)) == (
            "certificate",
            "the server's certificate is not for 127.0.0.1; write a host that it names in "
            f"tiers.objects.{key}, or give the server a certificate for 127.0.0.1",
        )


def test_a_server_without_tls(tmp_path: Path) -> None:
    """Valkey waits for more; others answer something else, as SSH's do."""
    fix = "if the server has no TLS, write valkey:// in tiers.objects.url"
    with running_valkey(tmp_path / "log") as server:
        url = f"valkeys://127.0.0.1:{server.port}"
        reason, text = refusal(ObjectOptions(url, connect_timeout_s=0.2))
        assert (reason, text) == ("timeout", f"no answer to a TLS handshake; {fix}")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with listener.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-x\r\n")
                peer.recv(4096)

        answered = pool.submit(answer)
        url = f"valkeys://127.0.0.1:{listener.getsockname()[1]}"
        reason, text = refusal(ObjectOptions(url))
        answered.result(10)
    assert reason == "tls"
    assert text.endswith(fix)
