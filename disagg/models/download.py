"""Downloads one file of a known size and digest from a Python package index.

What has arrived stays in a `.part` file when the connection breaks, and the next call goes on from
there. A file with another digest is never given a name: it is removed, and the error says so.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx

from disagg.errors import ConfigError, DisaggError

PYPI = "https://pypi.org/simple"
# As pip and uv name them; the first that is set counts.
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_KINDS = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_TRIES = 3

Progress = Callable[[int], None]
"""Called with the number of bytes that are there."""


class DownloadError(DisaggError):
    """A file could not be had. The message names the cause and the fix."""


class NoNetworkError(DownloadError):
    """The package index cannot be reached at all."""


def fetch(
    project: str, name: str, size: int, sha256: str, folder: Path, progress: Progress
) -> Path:
    """The file `name` of a project, downloaded to the folder unless it is there.

    Raises `DownloadError` if the index or the file cannot be reached, or if the file is damaged.
    """
    path, part = folder / name, folder / f"{name}.part"
    if path.is_file() and path.stat().st_size == size and _digest(path) == sha256:
        progress(size)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with httpx.Client(timeout=_TIMEOUT, follow_redirects=True) as client:
        url = _find(client, project, name)
        _download(client, url, part, size, progress)
    if _digest(part) != sha256:
        part.unlink()
        raise DownloadError(
            f"{name}: what arrived is not the file that disagg knows (another SHA-256); it was "
            "removed. Try again, or use another package index"
        )
    part.replace(path)
    return path


def index_url() -> str:
    """The package index: pip's or uv's, if their variables or pip's own files name one."""
    named = next((os.environ[v] for v in INDEX_VARIABLES if os.environ.get(v)), None)
    return named or _configured() or PYPI


@cache
def _configured() -> str:
    """The index of pip's configuration files; empty if they name none, or there is no pip."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _find(client: httpx.Client, project: str, name: str) -> str:
    page = f"{index_url().rstrip('/')}/{project}/"
    try:
        answer = client.get(page, headers={"accept": _KINDS})
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        kind = NoNetworkError if isinstance(error, httpx.TransportError) else DownloadError
        raise kind(
            f"{shown(page)}: {_cause(error)}; check the network, or name a package "
            f"index by {INDEX_VARIABLES[-1]}"
        ) from error
    for file, url in _files(answer):
        if file == name:
            return urljoin(str(answer.url), url)
    raise DownloadError(
        f"{shown(page)}: has no {name}; name an index that has it by {INDEX_VARIABLES[-1]}"
    )


def _files(answer: httpx.Response) -> list[tuple[str, str]]:
    """Names and addresses of the files of an index's page, in either form of the standard."""
    if "json" in answer.headers.get("content-type", ""):
        return [(file["filename"], file["url"]) for file in answer.json()["files"]]
    links = _Links()
    links.feed(answer.text)
    return links.found


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = list[tuple[str, str]]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        url = dict(attrs).get("href")
        if tag == "a" and url:
            url = url.partition("#")[0]
            self.found.append((url.rpartition("/")[2], url))


def _download(client: httpx.Client, url: str, part: Path, size: int, progress: Progress) -> None:
    """Bring the rest of the file. Raises `DownloadError` if it broke off and did not go on."""
    for tried in range(1, _TRIES + 1):
        there = part.stat().st_size if part.exists() else 0
        if there > size:
            part.unlink()
            there = 0
        progress(there)
        if there == size:
            return
        try:
            _bring(client, url, part, there, progress)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            arrived = part.stat().st_size if part.exists() else 0
            if tried == _TRIES and arrived < size:
                raise DownloadError(
                    f"{shown(url)}: the download broke off after "
                    f"{arrived / 1e6:.0f} of {size / 1e6:.0f} MB ({_cause(error)}). What arrived "
                    "is kept: run the command again to go on"
                ) from error
        except OSError as error:
            raise ConfigError(f"{part}: can't be written ({error.strerror})") from error
    if part.stat().st_size != size:
        raise DownloadError(
            f"{shown(url)}: has {part.stat().st_size} bytes, not {size}; use another package index"
        )


def _bring(client: httpx.Client, url: str, part: Path, there: int, progress: Progress) -> None:
    headers = {"range": f"bytes={there}-"} if there else {}
    with client.stream("GET", url, headers=headers) as answer:
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            there = 0  # the server sends all of it
        with part.open("ab" if there else "wb") as file:
            for piece in answer.iter_bytes():
                file.write(piece)
                there += len(piece)
                progress(there)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cause(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    return str(error) or type(error).__name__


def shown(url: str) -> str:
    """An address without its password."""
    return re.sub(r"//[^/@]*@", "//", url)
