"""The drain command: who may use it, what it refuses, and how to undo it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from unit.router.conftest import Setup

from disagg.credentials import ApiKey
from disagg.router.server.drain import Drain
from disagg.router.server.peer_processes import merged_metrics
from disagg.testing.http import client

BODY = {"model": "m", "prompt": "x", "stream": False}
Make = Callable[..., Setup]


def post(setup: Setup, **headers: str) -> httpx.Response:
    return client().post(f"{setup.url}/v1/completions", json=BODY, headers=headers, timeout=20)


def test_a_drain_begins_and_is_undone(setup: Setup) -> None:
    drain = f"{setup.url}/disagg/drain"
    assert client().get(drain).json() == {"draining": False, "in_flight": 0}
    assert client().post(drain).json() == {"draining": True, "in_flight": 0}
    refused = post(setup)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert client().get(f"{setup.url}/ready").json() == {"ready": False, "draining": True}
    assert client().get(f"{setup.url}/health").status_code == 200
    assert client().get(f"{setup.url}/metrics").status_code == 200
    assert client().delete(drain).json() == {"draining": False, "in_flight": 0}
    assert post(setup).status_code == 200
    assert "draining" not in client().get(f"{setup.url}/ready").json()


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via", "origin"])
def test_a_request_through_a_proxy_or_a_web_page_is_refused(setup: Setup, header: str) -> None:
    answer = client().post(f"{setup.url}/disagg/drain", headers={header: "http://elsewhere"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "there is no such path"
    assert post(setup).status_code == 200


def test_with_keys_configured_one_is_required(make: Make) -> None:
    setup = make(api_keys=[ApiKey("ann", "right")])
    drain, key = f"{setup.url}/disagg/drain", {"authorization": "Bearer right"}
    assert client().post(drain).status_code == 401
    assert post(setup, **key).status_code == 200
    assert client().post(drain, headers=key).json()["draining"]
    assert post(setup, **key).status_code == 503


def test_a_shutdown_cannot_be_undone() -> None:
    async def scene() -> bool:
        drain = Drain()
        await drain.finish(0)
        drain.undo()
        return drain.draining

    assert asyncio.run(scene())


def test_metrics_of_processes_have_a_label() -> None:
    text = '# HELP a_total A.\n# TYPE a_total counter\na_total{x="1"} %d\n'
    shown = merged_metrics({0: text % 2, 3: text % 5}).decode().splitlines()
    assert shown.count("# TYPE a_total counter") == 1
    assert 'a_total{process="0",x="1"} 2.0' in shown
    assert 'a_total{process="3",x="1"} 5.0' in shown
