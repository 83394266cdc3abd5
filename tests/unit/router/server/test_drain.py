"""The drain command: who may use it, what it refuses, and how to undo it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from unit.router.conftest import AS_OPERATOR, OPERATOR, Setup

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
    assert client().get(drain, headers=AS_OPERATOR).json() == {"draining": False, "in_flight": 0}
    assert client().post(drain, headers=AS_OPERATOR).json() == {"draining": True, "in_flight": 0}
    refused = post(setup)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert client().get(f"{setup.url}/ready").json() == {"ready": False, "draining": True}
    assert client().get(f"{setup.url}/health").status_code == 200
    assert client().get(f"{setup.url}/metrics").status_code == 200
    assert client().delete(drain, headers=AS_OPERATOR).json() == {"draining": False, "in_flight": 0}
    assert post(setup).status_code == 200
    assert "draining" not in client().get(f"{setup.url}/ready").json()


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_without_an_admin_key_it_is_closed_also_from_this_machine(make: Make, method: str) -> None:
    setup = make(api_keys=[])
    answer = client().request(method, f"{setup.url}/disagg/drain")
    assert answer.status_code == 403
    assert "router.admin_keys_file" in answer.json()["error"]["message"]
    assert post(setup).status_code == 200


def test_a_clients_key_does_not_drain(make: Make) -> None:
    setup = make(api_keys=[ApiKey("ann", "right"), OPERATOR])
    drain, key = f"{setup.url}/disagg/drain", {"authorization": "Bearer right"}
    assert client().post(drain).status_code == 401
    assert client().post(drain, headers=key).status_code == 403
    assert post(setup, **key).status_code == 200
    assert client().post(drain, headers=AS_OPERATOR).json()["draining"]
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
