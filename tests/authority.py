"""An authority for certificates, of one test, and what speaks TLS in front of a plain server."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_KIND = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificate(NamedTuple):
    """PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates. file: what trusts it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.file = folder, folder / "authority.pem"
        self._key = folder / "authority.key"
        self._run("req", "-x509", *_KIND, "-days", "2", "-subj", "/CN=authority of a test",
                  "-keyout", str(self._key), "-out", str(self.file))  # fmt: skip

    def sign(self, name: str, names: str) -> Certificate:
        """names: as openssl writes them, such as `DNS:localhost,IP:127.0.0.1`."""
        cert, key, asked, more = (
            self._folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext")
        )
        more.write_text(f"subjectAltName={names}\n")
        self._run("req", *_KIND, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(asked))
        self._run("x509", "-req", "-in", str(asked), "-CA", str(self.file), "-CAkey",
                  str(self._key), "-CAcreateserial", "-days", "2", "-extfile", str(more),
                  "-out", str(cert))  # fmt: skip
        return Certificate(cert, key)

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)


@contextlib.contextmanager
def tls_before(port: int, certificate: Certificate) -> Iterator[int]:
    """A port that speaks TLS, and passes all on to this port of the loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    opened, threads = list[socket.socket](), list[threading.Thread]()

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):  # also of a handshake that the client breaks off
                opened.append(raw)
                raw.settimeout(10)
                down = context.wrap_socket(raw, server_side=True)
                down.settimeout(None)
                up = socket.create_connection(("127.0.0.1", port))
                opened.extend((down, up))
                for ends in ((down, up), (up, down)):
                    threads.append(threading.Thread(target=pump, args=ends, daemon=True))
                    threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in opened:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
            for thread in (acceptor, *threads):
                thread.join(10)
