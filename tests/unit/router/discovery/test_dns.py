"""DNS names with several addresses.

The names are resolved by the system's own resolver in a network namespace of the test, with a DNS
server of the test at the address that resolvers take by default (`in_namespace`). Where namespaces
are not allowed, only the resolver's answers are made up.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.router.conftest import Loop, wait_for
from unit.router.managed import fakes, managed

from disagg.errors import ConfigError
from disagg.router.discovery import dns
from disagg.router.discovery.dns import Addresses, DnsName

SCENE = Path(__file__).with_name("dns_scene.py")


def may_unshare() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "--net", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def answer(*addresses: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 80)) for one in addresses]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("dns://", "names no host"),
        ("dns://h:0", "its port is no number"),
        ("dns://h:1?x", "has a query"),
        ("dns://10.0.0.7:8000", "10.0.0.7 is an address, no name; write http://"),
        ("dns://[::1]:8000", "::1 is an address"),
    ],
)
def test_what_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^--decode: ") as caught:
        DnsName("decode", url, "--decode", 1, 1)
    assert words in str(caught.value)


def test_an_address_that_answers_lack_stays_for_a_while() -> None:
    now = 0.0
    addresses = Addresses(10, lambda: now)
    assert addresses.seen(["a", "b"]) == {"a", "b"}
    now = 5
    assert addresses.seen(["b", "c"]) == {"a", "b", "c"}
    now = 14
    assert addresses.seen(["b"]) == {"a", "b", "c"}
    now = 15
    assert addresses.seen(["b"]) == {"b", "c"}, "a lacks since 5, c since 14"
    assert addresses.seen(["a"]) == {"a", "b", "c"}
    now = 30
    assert addresses.seen([]) == {"a"}
    now = 40
    assert addresses.seen([]) == frozenset()


def test_times_without_an_answer_do_not_count() -> None:
    now = 0.0
    addresses = Addresses(10, lambda: now)
    addresses.seen(["a"])
    now = 1000
    assert addresses.seen([]) == {"a"}


def test_ipv6_only_where_there_is_no_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer("10.0.0.1", "10.0.0.2", "10.0.0.1") + answer("fd00::1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert dns.resolve("h", 80) == {"10.0.0.1", "10.0.0.2"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer("fd00::1"))
    assert dns.resolve("h", 80) == {"fd00::1"}


def test_urls_keep_path_and_user(monkeypatch: pytest.MonkeyPatch) -> None:
    source = DnsName("decode", "dns://ann:s3cret@h:8000/team/v1", "x", 0.01, 0)
    assert "s3cret" not in source.name
    monkeypatch.setattr(dns, "resolve", lambda *_: frozenset(["fd00::1", "10.0.0.1"]))
    reported: list[Any] = []

    async def run() -> None:
        task = asyncio.create_task(source.run(reported.append))
        while not reported:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
    (engines,) = reported
    urls = ["http://10.0.0.1:8000/team", "http://[fd00::1]:8000/team"]
    assert [engine.url for engine in engines] == urls
    assert all(engine.authorization.startswith("Basic ") for engine in engines)


def test_a_router_follows_a_name(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The resolver's answers are made up: an address, none, a failure, the address again."""
    real = socket.getaddrinfo
    says: dict[str, Callable[[], list[Any]]] = {}

    def getaddrinfo(host: Any, *args: Any, **more: Any) -> Any:
        return says["now"]() if host == "engines.test" else real(host, *args, **more)

    def fails(code: int) -> Callable[[], list[Any]]:
        def fail() -> list[Any]:
            raise socket.gaierror(code, "told to")

        return fail

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with fakes(loop, "decode") as (decode,):
        url = f"dns://engines.test:{decode.url.rpartition(':')[2]}"
        says["now"] = fails(socket.EAI_AGAIN)
        with managed(loop, (), [url, url], engines={"dns_keep_s": 0.3}) as at:
            assert at.ready().json()["engines"] == {"decode": "has no engine now"}
            assert wait_for(lambda: "look-up failed (told to)" in caplog.text)
            says["now"] = lambda: answer("127.0.0.1")
            assert wait_for(lambda: at.states() == {"decode-0": "serves"})
            assert at.complete().status_code == 200
            says["now"] = fails(socket.EAI_AGAIN)
            assert not wait_for(lambda: at.states() != {"decode-0": "serves"}, 1)
            says["now"] = fails(socket.EAI_NONAME)
            assert wait_for(lambda: at.states() == {})
            says["now"] = lambda: answer("127.0.0.1")
            assert wait_for(lambda: at.states() == {"decode-0": "serves"})
            assert caplog.text.count("look-up failed") == 2


@pytest.mark.skipif(not may_unshare(), reason="needs user and network namespaces")
def test_real_look_ups() -> None:
    """`disagg router` in a namespace where the test's server answers on port 53."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
    run = subprocess.run(
        [*command, sys.executable, str(SCENE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "start": ["127.0.0.2", "127.0.0.3"],
        "one went": ["127.0.0.3"],
        "server fails": ["127.0.0.3"],
        "another came": ["127.0.0.3", "127.0.0.4"],
    }
