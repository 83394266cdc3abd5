"""Engines in a watched file, in every odd form and way of writing it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from unit.router.conftest import Loop, wait_for
from unit.router.managed import fakes, managed

from disagg.errors import ConfigError
from disagg.router.discovery.watched_file import WatchedFile, engines_in
from disagg.router.topology import EngineEndpoint

LOOK_S = 0.02
Seen = list[list[str]]


@contextmanager
def watched(path: Path) -> Iterator[tuple[Seen, WatchedFile]]:
    """The URLs of each report."""
    seen: Seen = []
    source = WatchedFile(path, LOOK_S)
    loop = Loop()

    def report(engines: object) -> None:
        assert isinstance(engines, list)
        seen.append([engine.url for engine in engines])

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(source.run(report))

    source.first()
    task = loop.run(start())
    try:
        yield seen, source
        assert not task.done()
    finally:
        loop.close()


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def by_rename(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def by_link(path: Path, text: str) -> None:
    """As kubelets replace a mounted ConfigMap: a link to a folder is swapped."""
    version = path.parent / f"v{time.monotonic_ns()}"
    version.mkdir()
    (version / "data").write_text(text)
    link = path.parent / "..data_new"
    link.symlink_to(version)
    link.rename(path.parent / "..data")
    if not path.is_symlink():
        path.unlink(missing_ok=True)
        path.symlink_to(path.parent / "..data" / "data")


@pytest.mark.parametrize("write", [in_place, by_rename, by_link])
def test_every_way_of_writing_is_seen(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    path = tmp_path / "engines.yaml"
    write(path, "decode: [http://a]")
    with watched(path) as (seen, _):
        write(path, "decode: [http://a, http://b]")
        assert wait_for(lambda: seen == [["http://a", "http://b"]])
        write(path, "decode: [http://a, http://c]")  # of the same length
        assert wait_for(lambda: seen[-1] == ["http://a", "http://c"])
        stamp = path.stat().st_mtime_ns
        path.write_text("decode: [http://a, http://d]")
        os.utime(path, ns=(stamp, stamp))  # and of the same time
        assert wait_for(lambda: seen[-1] == ["http://a", "http://d"])
        assert len(seen) == 3


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("decode:\n- http://a\n", ["http://a"]),
        ("prefill: [http://p]\ndecode: ['http://a/v1']\n", ["http://p", "http://a"]),
        ("decode: []", []),
        ("prefill: [http://p]", ["http://p"]),
        ('{"decode": ["http://a"]}', ["http://a"]),
        ('\ufeff{"decode": ["http://a"]}', ["http://a"]),
        ("# a comment\n---\ndecode: [http://a]\n...\n", ["http://a"]),
        ("decode: [http://a]\r\n", ["http://a"]),
        ("decode: [http://ann:s3cret@a]", ["http://a"]),
    ],
)
def test_good_forms(text: str, urls: list[str]) -> None:
    assert [engine.url for engine in engines_in(text.encode(), Path("f"))] == urls


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "f: empty; write decode: [] if there are no engines"),
        (b"# nothing\n", "f: empty"),
        (b"decode: [http://a", "f:1:18: not valid YAML"),
        (b"decode", "f: a str, not sections"),
        (b"[http://a]", "f: a list, not sections"),
        (b"decode: http://a", "f: decode: 'http://a'"),
        (b"decode: [1]", "f: decode.0: 1"),
        (b"decode:", "f: decode: empty"),
        (b"decodes: [http://a]", "f: decodes: unknown key; did you mean decode?"),
        (b"decode: [http://a]\ndecode: [http://b]", "is already on line 1"),
        (b"decode: [a:1]", "f: decode: 'a:1'"),
        (b"decode: [dns://a:1]", "dns is no scheme of engines"),
        (b"decode: [http://a]\xff", "f: not UTF-8"),
        (b"decode: [http://a]\x00", "f"),
        (b"--- {}\n--- {}", "f"),
        (b"decode: !!python/object:os.system [x]", "f"),
    ],
)  # fmt: skip
def test_bad_forms(data: bytes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engines_in(data, Path("f"))
    assert words in str(caught.value)


def test_an_error_shows_no_password() -> None:
    for text in ("decode: [http://ann:s3cret@]", "decode: 'http://ann:s3cret@h'", "decodes: {}"):
        with pytest.raises(ConfigError) as caught:
            engines_in(text.encode(), Path("f"))
        assert "s3cret" not in str(caught.value)


def test_a_bad_file_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("decode: [http://a]")

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    with watched(path) as (seen, _):
        path.write_text("decode: [http://a")
        assert wait_for(lambda: len(warnings()) == 1)
        time.sleep(LOOK_S * 10)
        path.unlink()
        assert wait_for(lambda: len(warnings()) == 2)
        path.mkdir()
        assert wait_for(lambda: len(warnings()) == 3)
        path.rmdir()
        os.mkfifo(path)
        assert wait_for(
            lambda: warnings()[-1].endswith("is no regular file; the known engines stay")
        )
        path.unlink()
        path.write_bytes(b"#" * (2 << 20))
        assert wait_for(lambda: "is over 1048576 bytes" in warnings()[-1])
        assert seen == []
        path.write_text("decode: [http://a]")
        assert wait_for(lambda: "works again" in warnings()[-1])
        assert seen == []
        path.write_text("decode: [http://b]")
        assert wait_for(lambda: seen == [["http://b"]])
    said = warnings()
    assert sum("not valid YAML" in words for words in said) == 1
    assert all(one != other for one, other in itertools.pairwise(said)), "each problem once"


def test_a_file_that_is_being_written_is_not_believed(tmp_path: Path) -> None:
    """Its first lines alone would be a good file."""
    path = tmp_path / "engines.yaml"
    text = "decode:\n" + "".join(f"- http://h{number}\n" for number in range(200))
    path.write_text(text)
    with watched(path) as (seen, _):
        for _ in range(3):
            with path.open("w") as file:
                for line in [*text.splitlines(keepends=True), "- http://one-more\n"]:
                    file.write(line)
                    file.flush()
                    time.sleep(LOOK_S / 100)
            assert wait_for(lambda: seen)
            path.write_text(text)
            assert wait_for(lambda: len(seen) == 2)
            assert [len(urls) for urls in seen] == [201, 200]
            seen.clear()


def test_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    assert WatchedFile(path, 1).first() == [], "it may come later"
    path.write_text("decode: [http://a]")
    assert WatchedFile(path, 1).first() == [EngineEndpoint("", "decode", "http://a")]
    path.write_text("decode: http://a")
    with pytest.raises(ConfigError):
        WatchedFile(path, 1).first()


def test_a_router_follows_its_file(loop: Loop, tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    with fakes(loop, "decode", "decode") as (first, second):
        path.write_text(json.dumps({"decode": [first.url]}))
        first.gate = threading.Event()
        with managed(loop, engines={"file": path}, operators_add=False) as at:
            answers = []
            asking = threading.Thread(target=lambda: answers.append(at.complete(stream=True)))
            asking.start()
            assert wait_for(lambda: first.bodies)
            by_rename(path, json.dumps({"decode": [second.url]}))
            assert wait_for(lambda: at.states() == {"decode-0": "drains", "decode-1": "serves"})
            assert at.complete().status_code == 200
            first.gate.set()
            asking.join()
            assert answers[0].content.endswith(b"[DONE]\n\n")
            assert wait_for(lambda: at.states() == {"decode-1": "serves"})
            assert at.engines()["decode-1"]["sources"] == [f"engines.file {path}"]
            path.write_text("decode: []")
            assert wait_for(lambda: at.ready().status_code == 503)
            assert wait_for(lambda: at.ready().json()["engines"] == {"decode": "has no engine now"})
            path.write_text(json.dumps({"decode": [second.url]}))
            assert wait_for(lambda: at.ready().status_code == 200)
