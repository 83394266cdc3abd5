"""Engines in Kubernetes pods, against a stand-in API server (`kubernetes_api.py`)."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from unit.router.conftest import FakeEngine, Loop, certificate, wait_for
from unit.router.kubernetes_api import NAMESPACE, ApiServer, pod
from unit.router.managed import Managed, fakes, managed

from disagg.config import KubernetesSection
from disagg.errors import ConfigError
from disagg.router.discovery.kubernetes import cluster

DECODE, PREFILL = {"app": "vllm", "role": "decode"}, {"app": "vllm", "role": "prefill"}
LABELS = "app=vllm,role="


class Scene:
    """A router that watches an API server, and one engine that all pods' addresses lead to."""

    def __init__(self, loop: Loop, api: ApiServer, at: Managed, engine: FakeEngine) -> None:
        self._loop, self.api, self.at, self.engine = loop, api, at, engine

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run(work)

    def put(self, name: str, ip: str | None, labels: dict[str, str] = DECODE, **more: Any) -> None:
        self.do(self.api.put(pod(name, labels, ip, **more)))

    def hosts(self) -> dict[str, str]:
        """The state of each engine by its host."""
        engines = self.at.engines().values()
        return {one["url"].split("/")[2].rpartition(":")[0]: one["state"] for one in engines}

    def serve(self, *hosts: str) -> bool:
        return wait_for(lambda: self.hosts() == dict.fromkeys(hosts, "serves"), 10)


async def listen(engine: FakeEngine) -> None:
    """At the addresses of pods too."""
    assert engine.runner is not None
    for number in range(2, 9):
        port = int(engine.url.rpartition(":")[2])
        await web.TCPSite(engine.runner, f"127.0.0.{number}", port, reuse_address=True).start()


@contextmanager
def scene(
    loop: Loop, api: ApiServer | None = None, tls: ssl.SSLContext | None = None, **section: Any
) -> Iterator[Scene]:
    api = api or ApiServer()
    loop.run(api.start(tls))
    with fakes(loop, "decode") as (engine,):
        loop.run(listen(engine))
        pods = {
            "api": api.url,
            "namespace": NAMESPACE,
            "decode": f"{LABELS}decode",
            "port": int(engine.url.rpartition(":")[2]),
            **section,
        }
        try:
            found = {"kubernetes": KubernetesSection(**pods)}
            with managed(loop, engines=found, operators_add=False) as at:
                yield Scene(loop, api, at, engine)
        finally:
            loop.run(api.stop())


def test_pods_come_and_go(loop: Loop) -> None:
    api = ApiServer()
    api.pods["old"] = pod("old", DECODE, "127.0.0.1")
    api.pods["other"] = pod("other", {"app": "db"}, "127.0.0.9")
    with scene(loop, api) as at:
        assert at.serve("127.0.0.1")
        assert wait_for(lambda: at.at.ready().status_code == 200)
        assert at.at.complete().status_code == 200
        at.put("starts", None, ready=False)
        at.put("new", "127.0.0.2", ready=False)
        at.put("new", "127.0.0.2")
        assert at.serve("127.0.0.1", "127.0.0.2")
        at.put("new", "127.0.0.2", ready=False)
        assert at.serve("127.0.0.1")
        at.put("new", "127.0.0.2")
        assert at.serve("127.0.0.1", "127.0.0.2")
        assert set(at.at.engines()) == {"decode-0", "decode-1"}, "it keeps its name"
        at.do(api.delete("old"))
        assert at.serve("127.0.0.2")
        at.put("new", "127.0.0.2", {"app": "vllm"})  # fits the selector no more
        assert at.serve()
        assert api.lists == 1, "all by one watch"
        assert at.at.ready().json()["engines"] == {"decode": "has no engine now"}


def test_a_pod_that_terminates_drains(loop: Loop) -> None:
    with scene(loop) as at, ThreadPoolExecutor() as pool:
        at.put("a", "127.0.0.1")
        assert at.serve("127.0.0.1")
        at.engine.gate = threading.Event()
        stream = pool.submit(at.at.complete, stream=True)
        assert wait_for(lambda: at.engine.bodies)
        ends = pod("a", DECODE, "127.0.0.1")
        ends["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
        at.do(at.api.put(ends))
        assert wait_for(lambda: at.hosts() == {"127.0.0.1": "drains"})
        at.do(at.api.delete("a"))
        at.engine.gate.set()
        assert stream.result().content.endswith(b"[DONE]\n\n")
        assert at.serve()


def test_both_roles(loop: Loop) -> None:
    with scene(loop, prefill=f"{LABELS}prefill") as at:
        at.put("d", "127.0.0.1")
        assert at.serve("127.0.0.1")
        assert at.at.ready().status_code == 503
        assert at.at.ready().json()["engines"]["prefill"] == "has no engine now"
        at.put("p", "127.0.0.2", PREFILL)
        assert at.serve("127.0.0.1", "127.0.0.2")
        assert wait_for(lambda: at.at.ready().status_code == 200)


def test_many_pods_are_listed_in_pages(loop: Loop) -> None:
    api = ApiServer(page=3)
    for number in range(1, 9):
        api.pods[f"p{number}"] = pod(f"p{number}", DECODE, f"127.0.0.{number}")
    with scene(loop, api) as at:
        assert at.serve(*(f"127.0.0.{number}" for number in range(1, 9)))
        assert api.lists == 3


def test_a_watch_that_breaks_goes_on_from_its_version(loop: Loop) -> None:
    with scene(loop) as at:
        at.put("a", "127.0.0.1")
        assert at.serve("127.0.0.1")
        for number in (2, 3, 4):
            assert wait_for(lambda: len(at.api.watches) >= number - 1)  # noqa: B023
            at.do(at.api.cut())
            at.put(f"p{number}", f"127.0.0.{number}")
            assert at.serve(*(f"127.0.0.{n}" for n in range(1, number + 1)))
        assert at.api.lists == 1
        versions = [int(watch["resourceVersion"]) for watch in at.api.watches]
        assert len(versions) >= 4
        assert versions == sorted(versions)


@pytest.mark.parametrize("bookmarks", [False, True])
def test_a_version_that_is_too_old_is_listed_anew(loop: Loop, bookmarks: bool) -> None:
    """What happened meanwhile, deletions too, is seen. A bookmark keeps the version young."""
    with scene(loop, ApiServer(bookmarks=bookmarks)) as at:
        at.put("a", "127.0.0.1")
        at.put("b", "127.0.0.2")
        assert at.serve("127.0.0.1", "127.0.0.2")
        if bookmarks:
            assert wait_for(lambda: bool(at.api.bookmarked))
            at.api.version += 50
            young = str(at.api.version)
            at.api.expired = at.api.version
            # One of them has come when others were sent behind it.
            assert wait_for(lambda: at.api.bookmarked.count(young) > 5)
            at.do(at.api.cut())
            assert wait_for(lambda: at.api.watches[-1]["resourceVersion"] == young)
            assert at.api.lists == 1
            return
        del at.api.pods["a"]  # of this no watch tells
        at.do(at.api.expire())
        assert at.serve("127.0.0.2")
        assert at.api.lists == 2
        at.put("c", "127.0.0.3")
        assert at.serve("127.0.0.2", "127.0.0.3")


def test_while_the_server_is_away_or_refuses_engines_stay(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with scene(loop) as at:
        at.put("a", "127.0.0.1")
        assert at.serve("127.0.0.1")
        at.do(at.api.stop())
        assert wait_for(lambda: "the known engines stay" in caplog.text)
        assert at.at.complete().status_code == 200
        at.api.refuses = 503
        at.do(at.api.start())
        assert wait_for(lambda: "the API server answers 503: 'told to'" in caplog.text, 20)
        assert at.at.complete().status_code == 200
        at.api.refuses = None
        at.put("b", "127.0.0.2")
        assert wait_for(lambda: at.serve("127.0.0.1", "127.0.0.2"), 20)
        assert caplog.text.count("answers 503") == 1
        assert "works again" in caplog.text


def test_tls_and_a_token_that_is_replaced(
    loop: Loop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = certificate(tmp_path, "api")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    token = tmp_path / "token"
    token.write_text("first\n")
    api = ApiServer(token="first")
    with scene(loop, api, context, token_file=token, ca_file=cert) as at:
        at.put("a", "127.0.0.1")
        assert at.serve("127.0.0.1")
        api.token = "second"
        token.write_text("second\n")
        at.do(api.cut())
        at.put("b", "127.0.0.2")
        assert at.serve("127.0.0.1", "127.0.0.2")
        token.write_text("wrong")
        at.do(api.cut())
        assert wait_for(lambda: "the API server answers 401: 'Unauthorized'" in caplog.text)
        assert at.serve("127.0.0.1", "127.0.0.2")
        assert "second" not in caplog.text
    with scene(loop, ApiServer(), context) as at:
        assert wait_for(lambda: "certificate verify failed" in caplog.text)
        assert at.api.lists == 0, "a server that nobody vouches for"


def test_a_load_while_pods_are_replaced(loop: Loop) -> None:
    """A rolling update, a watch that breaks, and a version that is too old."""
    with scene(loop) as at, ThreadPoolExecutor(8) as pool:
        at.put("p1", "127.0.0.1")
        assert at.serve("127.0.0.1")
        at.engine.chunk_s = 0.01
        asked = [pool.submit(at.at.complete, stream=True) for _ in range(500)]
        breaks: list[Callable[[], Coroutine[Any, Any, None]]] = [at.api.cut, at.api.expire]
        for number in range(2, 8):
            at.put(f"p{number}", f"127.0.0.{number}")
            assert at.serve(f"127.0.0.{number - 1}", f"127.0.0.{number}")
            at.do(at.api.delete(f"p{number - 1}"))
            at.do(breaks[number % 2]())
            assert at.serve(f"127.0.0.{number}")
        answers = [one.result() for one in asked]
        assert {answer.status_code for answer in answers} == {200}
        assert all(answer.content.endswith(b"[DONE]\n\n") for answer in answers)


# ---- settings ----------------------------------------------------------------------------------


def section(**more: Any) -> KubernetesSection:
    return KubernetesSection(**{"decode": "app=vllm", **more})


def test_inside_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    (tmp_path / "namespace").write_text("team-a")
    (tmp_path / "token").write_text("t")
    cert, _ = certificate(tmp_path, "ca")
    Path(cert).rename(tmp_path / "ca.crt")
    found = cluster(section(), "x", tmp_path)
    assert found.pods() == "https://[fd00::1]:6443/api/v1/namespaces/team-a/pods"
    assert (found.token_file, found.port) == (tmp_path / "token", 8000)
    assert found.tls is not None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "x.api: empty, and this is no pod"),
        ({"api": "https://h"}, "x.namespace: empty, and this is no pod"),
        ({"api": "http://h", "namespace": "n", "token_file": "t"}, "must not go over http"),
        ({"api": "https://h", "namespace": "n", "token_file": "/none"}, "make it readable"),
        ({"api": "https://h", "namespace": "n", "ca_file": "/none"}, "'/none' — No such"),
        ({"api": "https://h", "namespace": "n", "ca_file": "/dev/null"}, "name a PEM file"),
    ],
)  # fmt: skip
def test_what_is_refused(
    given: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError) as caught:
        cluster(section(**given), "x", tmp_path)
    assert words in str(caught.value)
