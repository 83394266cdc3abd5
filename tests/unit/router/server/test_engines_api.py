"""Operators add and remove engines of a router that serves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from unit.router.conftest import AS_OPERATOR, Loop, Setup, wait_for
from unit.router.managed import PATH, fakes, managed

from disagg.testing.http import client


def test_an_engine_is_added_and_removed(loop: Loop) -> None:
    with fakes(loop, "decode", "decode") as (first, second), managed(loop, (), [first.url]) as at:
        added = at.add("decode", f"{second.url}/v1/")
        assert added.status_code == 200
        assert added.json() == {
            "name": "decode-1",
            "role": "decode",
            "url": second.url,
            "state": "serves",
            "sources": ["operators"],
            "in_flight": 0,
        }
        assert at.add("decode", second.url).json()["name"] == "decode-1", "once more"
        assert at.states() == {"decode-0": "serves", "decode-1": "serves"}
        assert wait_for(lambda: at.ready().json()["engines"] == dict.fromkeys(at.states(), "up"))
        for _ in range(8):
            assert at.complete().status_code == 200
        before = len(first.bodies)
        assert before + len(second.bodies) == 8
        assert second.bodies
        assert at.remove("decode-0").json()["state"] == "drains"
        assert at.complete().status_code == 200
        assert len(first.bodies) == before
        assert wait_for(lambda: at.states() == {"decode-1": "serves"})
        assert at.add("decode", first.url).json()["name"] == "decode-0", "it keeps its name"


def test_what_runs_ends_undisturbed(loop: Loop) -> None:
    with fakes(loop, "decode", "decode") as (first, second):
        first.gate = threading.Event()
        with managed(loop, (), [first.url]) as at, ThreadPoolExecutor() as pool:
            stream = pool.submit(at.complete, stream=True)
            assert wait_for(lambda: first.bodies)
            at.add("decode", second.url)
            removed = at.remove("decode-0").json()
            assert (removed["state"], removed["in_flight"]) == ("drains", 1)
            for _ in range(4):
                assert at.complete().status_code == 200
            assert (len(first.bodies), len(second.bodies)) == (1, 4)
            assert at.ready().json()["engines"]["decode-0"] == "drains"
            metrics = client().get(f"{at.url}/metrics").text
            drains = 'disagg_router_engine_drains{engine="decode-0",role="decode"} 1.0'
            assert drains in metrics
            assert 'disagg_router_engine_up{engine="decode-0"' not in metrics
            shown = client().get(f"{at.url}/ui/state").json()["engines"]
            assert {"name": "decode-0", "role": "decode", "state": "drains"} in shown
            first.gate.set()
            assert stream.result().content.endswith(b"data: [DONE]\n\n")
            assert wait_for(lambda: at.states() == {"decode-1": "serves"})
            assert 'engine="decode-0"' not in client().get(f"{at.url}/metrics").text


def test_a_prefill_engine_stays_until_its_lease_was_fetched(loop: Loop) -> None:
    with fakes(loop, "prefill", "decode") as (prefill, decode):
        decode.gate = threading.Event()
        with managed(loop, [prefill.url], [decode.url]) as at, ThreadPoolExecutor() as pool:
            asked = pool.submit(at.complete)
            assert wait_for(lambda: decode.bodies)
            assert at.remove("prefill-0").json()["in_flight"] == 1
            assert not wait_for(lambda: "prefill-0" not in at.engines(), 1)
            assert wait_for(lambda: at.ready().status_code == 200), "nobody misses it"
            decode.gate.set()
            assert asked.result().status_code == 200
            assert wait_for(lambda: "prefill-0" not in at.engines())
            assert prefill.released == []


def test_a_lease_that_nobody_fetches_is_released_first(loop: Loop) -> None:
    with fakes(loop, "prefill", "decode") as (prefill, decode):
        decode.gate = threading.Event()
        decode.status = 400
        with managed(loop, [prefill.url], [decode.url]) as at, ThreadPoolExecutor() as pool:
            asked = pool.submit(at.complete)
            assert wait_for(lambda: decode.bodies)
            at.remove("prefill-0")
            decode.gate.set()
            assert asked.result().status_code == 400
            assert wait_for(lambda: "prefill-0" not in at.engines())
            assert len(prefill.released) == 1


def test_a_drain_ends_in_time_and_cuts_nothing(loop: Loop) -> None:
    with fakes(loop, "decode", "decode") as (first, second):
        gate = first.gate = second.gate = threading.Event()  # so that each has one
        limits = {"drain_s": 0.5}
        with (
            managed(loop, (), [first.url, second.url], limits=limits) as at,
            ThreadPoolExecutor() as pool,
        ):
            asked = [pool.submit(at.complete, stream=True) for _ in range(2)]
            assert wait_for(lambda: first.bodies)
            at.remove("decode-0")
            assert wait_for(lambda: at.states() == {"decode-1": "serves"})
            gate.set()
            assert all(one.result().content.endswith(b"[DONE]\n\n") for one in asked)


def test_requests_wait_for_the_first_engine(loop: Loop) -> None:
    with fakes(loop, "decode") as (decode,), managed(loop) as at, ThreadPoolExecutor(8) as pool:
        assert at.ready().status_code == 503
        assert at.ready().json()["engines"] == {"decode": "has no engine now"}
        asked = [pool.submit(at.complete) for _ in range(8)]
        waiting = "disagg_router_queued 8.0"
        assert wait_for(lambda: waiting in client().get(f"{at.url}/metrics").text)
        at.add("decode", decode.url)
        assert [one.result().status_code for one in asked] == [200] * 8
        assert wait_for(lambda: at.ready().json()["engines"] == {"decode-0": "up"})


def test_who_waits_too_long_hears_why(loop: Loop) -> None:
    with managed(loop, limits={"queue_timeout_s": 0.2}) as at:
        answer = at.complete()
        assert answer.status_code == 503
        assert "no decode engine is up (decode has no engine now)" in answer.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"", "Input data was truncated"),
        (b"[]", "Expected `object`"),
        (b'{"role": "decode"}', "missing required field `url`"),
        (b'{"role": "both", "url": "http://h"}', "Invalid enum value 'both'"),
        (b'{"role": "decode", "url": "h:1"}', "url: 'h:1' — has no scheme"),
        (b'{"role": "decode", "url": "http://a:s3cret@"}', "names no host"),
        (b'{"role": "decode", "url": "http://h", "x": 1}', "unknown field `x`"),
    ],
)
def test_what_is_refused(loop: Loop, given: bytes, words: str) -> None:
    with managed(loop) as at:
        answer = client().post(at.url + PATH, content=given, headers=AS_OPERATOR)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert "s3cret" not in answer.text
        assert at.engines() == {}


def test_an_unknown_name_is_404(loop: Loop) -> None:
    with managed(loop) as at:
        answer = at.remove("decode-7")
        assert (answer.status_code, "'decode-7'" in answer.text) == (404, True)


def test_it_is_for_operators(loop: Loop) -> None:
    with managed(loop) as at:
        for method, path in (("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/decode-0")):
            assert client().request(method, at.url + path).status_code == 403


def test_a_password_is_kept_and_not_shown(loop: Loop) -> None:
    with fakes(loop, "decode") as (decode,), managed(loop) as at:
        url = decode.url.replace("http://", "http://ann:s3cret@")
        assert at.add("decode", url).json()["url"] == decode.url
        assert at.complete().status_code == 200
        assert decode.headers[0]["authorization"].startswith("Basic ")
        assert "s3cret" not in client().get(at.url + PATH, headers=AS_OPERATOR).text


def test_a_deployments_engines_are_not_changed_so(setup: Setup) -> None:
    answer = client().get(setup.url + PATH, headers=AS_OPERATOR)
    assert answer.status_code == 409
    assert "disagg scale" in answer.text
