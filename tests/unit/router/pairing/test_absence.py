"""While the only decode engine is away, requests wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from unit.router.conftest import Setup
from unit.router.pairing.test_admission import complete, metric, until
from unit.router.test_other_engines import replace

from disagg.router.topology import Away

Make = Callable[..., Setup]


def test_requests_wait_for_an_engine_that_starts_again(setup: Setup) -> None:
    prefill, decode = setup.endpoints
    replace(setup, [prefill], **{decode.name: Away("starts again")})
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(complete, setup) for _ in range(20)]
        until(lambda: metric(setup, "disagg_router_queued") == 20)
        replace(setup, [prefill, decode])
        assert [answer.result().status_code for answer in asked] == [200] * 20


def test_what_is_known_of_a_restart_is_said(make: Make) -> None:
    setup = make(limits={"queue_timeout_s": 0.5})
    prefill, decode = setup.endpoints
    replace(setup, [prefill], **{decode.name: Away("starts again", back_s=40)})
    answer = complete(setup)
    assert answer.status_code == 503
    assert 30 <= int(answer.headers["retry-after"]) <= 40
    message = answer.json()["error"]["message"]
    assert "no decode engine is up (decode-0 starts again; back in about" in message
    replace(setup, [prefill], **{decode.name: Away("starts again", back_s=-3)})
    assert complete(setup).headers["retry-after"] == "1", "it is late"


def test_a_full_queue_says_that_no_engine_is_up(make: Make) -> None:
    setup = make(limits={"max_queued": 0})
    prefill, decode = setup.endpoints
    replace(setup, [prefill], **{decode.name: Away("starts")})
    answer = complete(setup)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


def test_nobody_waits_for_what_does_not_come_back(setup: Setup) -> None:
    prefill, decode = setup.endpoints
    replace(setup, [prefill], **{decode.name: Away("given up", returns=False)})
    began = time.monotonic()
    assert complete(setup).status_code == 503
    assert time.monotonic() - began < 5


def test_requests_wait_for_an_engine_that_is_not_reached(setup: Setup) -> None:
    """A router alone hears of no restarts: it finds the engine gone, and probes it."""
    setup.loop.run(setup.decode.stop())
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(complete, setup) for _ in range(20)]
        until(lambda: metric(setup, "disagg_router_queued") == 20)
        assert not any(answer.done() for answer in asked)
        setup.loop.run(setup.decode.start())
        assert [answer.result().status_code for answer in asked] == [200] * 20
    assert len(setup.decode.bodies) == 20


def test_a_request_that_ends_engines_is_not_sent_for_ever(make: Make) -> None:
    """It may be what ends them."""
    setup = make(limits={"queue_timeout_s": 5})
    setup.decode.dies = True
    assert complete(setup).status_code == 503
    assert len(setup.decode.bodies) == 2
