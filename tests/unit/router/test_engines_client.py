"""`disagg engines` against `disagg router` of two processes: real processes on both sides."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from unit.router.conftest import FakeEngine, Loop
from unit.router.managed import fakes
from unit.router.test_process import Router, disagg, start, until

__all__ = ["start"]
Start = Callable[..., Router]


def complete(router: Router, **more: Any) -> httpx.Response:
    """On a connection of its own, which either process may accept."""
    body = {"model": "m", "prompt": "x", **more}
    return httpx.post(f"{router.url}/v1/completions", json=body, timeout=60)


def decodes(router: Router, *engines: FakeEngine) -> list[int]:
    """How many of some requests each engine gets."""
    for engine in engines:
        engine.bodies.clear()
    for _ in range(24):
        assert complete(router).status_code == 200
    return [len(engine.bodies) for engine in engines]


def test_engines_of_all_processes(start: Start, loop: Loop, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    at = tmp_path / "admin"
    file = tmp_path / "engines.json"
    file.write_text("{decode: []}")
    config = f"processes: 2\nengines: {{file: {file}, refresh_s: 0.1}}\n"
    router = start("--admin-socket", str(at), "--local-prefill-tokens", "4096", config=config)
    until(lambda: "Ready: " in router.text)

    def listed() -> dict[str, str]:
        shown = disagg("engines", "ls", str(at), "--json")
        return {one["name"]: one["state"] for one in json.loads(shown.stdout)}

    with fakes(loop, "decode", "decode") as (added, filed), ThreadPoolExecutor() as pool:
        assert listed() == {"prefill-0": "serves", "decode-0": "serves"}
        done = disagg("engines", "add", str(at), "--decode", added.url)
        assert (done.returncode, done.stdout) == (0, f"decode-1 serves: {added.url}\n")
        file.write_text(json.dumps({"decode": [filed.url]}))
        until(lambda: listed().get("decode-2") == "serves")
        until(lambda: min(decodes(router, router.decode, added, filed)) > 0)

        gate = router.decode.gate = threading.Event()
        router.decode.bodies.clear()
        streams = [pool.submit(complete, router, stream=True) for _ in range(12)]
        until(lambda: router.decode.bodies != [])
        words = ["engines", "remove", str(at), "--name", "decode-0"]
        done = disagg(*words)
        assert (done.returncode, "decode-0 drains, " in done.stdout) == (0, True)
        assert listed()["decode-0"] == "drains"
        late = disagg(*words, "--wait", "--timeout", "0.1")
        assert (late.returncode, "not gone in 0.1 s: decode-0" in late.stderr) == (1, True)
        calls = router.text.count('"method":"DELETE"')
        waiting = pool.submit(disagg, *words, "--wait")
        until(lambda: router.text.count('"method":"DELETE"') > calls)
        gate.set()
        assert waiting.result().stdout.endswith("\ngone\n")
        assert all(one.result().content.endswith(b"[DONE]\n\n") for one in streams)
        until(lambda: "decode-0" not in listed())
        assert decodes(router, router.decode)[0] == 0
        file.write_text("decode: []")
        until(lambda: listed() == {"prefill-0": "serves", "decode-1": "serves"})
        assert decodes(router, added, filed) == [24, 0]


def test_a_process_that_starts_has_the_engines_of_now(
    start: Start, loop: Loop, tmp_path: Path
) -> None:
    """They change while it starts."""
    tmp_path.chmod(0o700)
    at = tmp_path / "admin"
    router = start("--processes", "2", "--admin-socket", str(at), "--local-prefill-tokens", "4096")
    transport = httpx.HTTPTransport(uds=str(at))
    with fakes(loop, "decode") as (other,), httpx.Client(transport=transport) as operator:
        path = "http://router/disagg/engines"
        operator.post(path, json={"role": "decode", "url": other.url}).raise_for_status()
        old = router.children()
        old[0].kill()
        until(lambda: set(router.children()) - set(old))
        operator.delete(f"{path}/decode-0").raise_for_status()
        metrics = f"{router.url}/metrics"
        until(lambda: {f'process="{n}"' in httpx.get(metrics).text for n in (0, 1)} == {True})
        assert decodes(router, router.decode, other) == [0, 24]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["ls", "nobody-has-this-name"], "no deployment"),
        (["add", "http://127.0.0.1:1"], "--prefill, --decode: none given"),
        (["ls", "ftp://h"], "WHERE: 'ftp://h' — not a router's URL"),
        (["ls", "http://h", "--key-env", "NO_SUCH"], "--key-env: 'NO_SUCH'"),
    ],
)
def test_what_is_refused(words: list[str], problem: str) -> None:
    done = disagg("engines", *words)
    assert done.returncode == 2
    assert problem in done.stderr


def test_a_router_that_is_not_there() -> None:
    done = disagg("engines", "ls", "http://127.0.0.1:1")
    assert (done.returncode, "Connection refused" in done.stderr) == (1, True)
