"""What another engine's cache holds is fetched first; the request is served in any case."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from unit.router import sharing
from unit.router.conftest import Setup, leave, wait_for
from unit.router.sharing import HELD, OF_DECODE, OF_PREFILL, PROMPT

from disagg.testing.http import client

BODY = {"model": "m", "prompt": PROMPT, "stream": True, "temperature": 0.5}


@pytest.fixture
def shared(make: Callable[..., Setup]) -> Callable[..., Setup]:
    """Makes a router whose engines share; one of them holds the prompt's beginning."""

    def shared(holder: str, **pairing: Any) -> Setup:
        return sharing.start(make, holder, pairing)

    return shared


def post(setup: Setup, **more: Any) -> httpx.Response:
    return client().post(f"{setup.url}/v1/completions", json={**BODY, **more}, timeout=20)


def sources(setup: Setup, outcome: str) -> float:
    text = client().get(f"{setup.url}/metrics", timeout=10).text
    name = f'disagg_router_sources_total{{outcome="{outcome}"}} '
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if name in line)


def test_prefill_fetches_from_decode(
    shared: Callable[..., Setup], capsys: pytest.CaptureFixture[str]
) -> None:
    setup = shared("decode-0")
    assert post(setup, user="u").status_code == 200
    source, decode = setup.decode.bodies
    (prefill,) = setup.prefill.bodies
    assert source.pop("kv_transfer_params")["do_remote_decode"] is True
    assert source == {
        "model": "m",
        "prompt": PROMPT[: HELD + 1],  # it computes one token, which prefill then has
        "max_tokens": 1,
        "temperature": 0,
        "user": "u",
    }
    asked = prefill["kv_transfer_params"]
    assert asked["do_remote_decode"] is asked["do_remote_prefill"] is True
    assert asked["disagg"] == "decode's ticket"
    assert prefill["prompt"] == decode["prompt"] == PROMPT
    assert decode["kv_transfer_params"] == OF_PREFILL
    assert sources(setup, "leased") == 1
    assert not setup.decode.released
    assert wait_for(lambda: '"source":"decode-0"' in capsys.readouterr().out)


def test_decode_fetches_and_computes_the_little_that_is_left(shared: Callable[..., Setup]) -> None:
    setup = shared("prefill-0", local_prefill_tokens=len(PROMPT) - HELD)
    assert post(setup).status_code == 200
    (source,), (decode,) = setup.prefill.bodies, setup.decode.bodies
    assert source["prompt"] == PROMPT[: HELD + 1]
    assert decode["prompt"] == PROMPT
    assert decode["kv_transfer_params"] == OF_PREFILL
    text = client().get(f"{setup.url}/metrics", timeout=10).text
    assert 'disagg_router_local_total{reason="prefix_elsewhere"} 1.0' in text


def test_another_salt_is_another_prompt(shared: Callable[..., Setup]) -> None:
    """Of which nobody holds anything."""
    setup = shared("decode-0")
    assert post(setup, cache_salt="s").status_code == 200
    assert len(setup.decode.bodies) == len(setup.prefill.bodies) == 1
    assert "disagg" not in setup.prefill.bodies[0]["kv_transfer_params"]


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"params": None}, "refused"),
        ({"params": {"do_remote_prefill": False}}, "refused"),
        ({"status": 500}, "refused"),
        ({"status": 400}, "refused"),
        ({"dies": True}, "failed"),
        ({"first_byte_s": 30.0}, "failed"),
    ],
    ids=str,
)
def test_a_source_without_a_lease(
    shared: Callable[..., Setup], change: dict[str, Any], outcome: str
) -> None:
    """Prefill computes all. A source that takes its time is left, so that its engine aborts."""
    setup = shared("decode-0")
    for name, value in change.items():
        setattr(setup.decode, name, value)
    gate = setup.prefill.gate = threading.Event()

    def mend() -> None:
        assert wait_for(lambda: setup.prefill.bodies, 15)
        setup.decode.status, setup.decode.dies, setup.decode.first_byte_s = 200, False, 0.0
        gate.set()

    thread = threading.Thread(target=mend)
    thread.start()
    answer = post(setup)
    thread.join(20)
    assert answer.status_code == 200
    assert "disagg" not in setup.prefill.bodies[0]["kv_transfer_params"]
    assert setup.decode.bodies[-1]["kv_transfer_params"] == OF_PREFILL
    assert sources(setup, outcome) == 1
    if "first_byte_s" in change:
        assert setup.decode.left.wait(5)


def test_a_lease_that_nobody_fetched_is_released(shared: Callable[..., Setup]) -> None:
    setup = shared("decode-0")
    setup.prefill.dies = True
    assert post(setup).status_code == 200, "decode computes"
    assert wait_for(lambda: setup.decode.released == [OF_DECODE])


def test_a_refusal_of_prefill_ends_the_lease(shared: Callable[..., Setup]) -> None:
    setup = shared("decode-0")
    setup.prefill.status = 400
    assert post(setup).status_code == 400
    assert wait_for(lambda: setup.decode.released == [OF_DECODE])


def test_a_client_that_leaves_while_prefill_fetches(shared: Callable[..., Setup]) -> None:
    setup = shared("decode-0")
    setup.prefill.first_byte_s = 20.0
    leave(setup.url, BODY, lambda: setup.prefill.bodies)
    assert wait_for(lambda: setup.decode.released == [OF_DECODE])
    assert setup.prefill.left.wait(5)
