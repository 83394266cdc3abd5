"""The status document `/ui/state`, and `disagg status`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from unit.router import sharing
from unit.router.conftest import AS_OPERATOR, Setup
from unit.router.pairing.test_admission import complete, until
from unit.router.server.metered_engine import BYTES, HIDDEN, MeteredEngine

from disagg.router.topology import Away
from disagg.testing.http import client

Make = Callable[..., Setup]


def state_of(setup: Setup) -> dict[str, Any]:
    state: dict[str, Any] = (
        client().get(f"{setup.url}/ui/state", headers=AS_OPERATOR, timeout=10).json()
    )
    return state


def status(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "disagg.cli", "status", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"COLUMNS": "150"}
    )


def test_how_much_of_a_handoff_was_hidden(make: Make) -> None:
    setup = make(kind=MeteredEngine)
    assert complete(setup, list(range(30))).status_code == 200
    until(lambda: state_of(setup)["engines"][1]["handoffs"]["tcp"]["bytes"] == BYTES)
    for headers in (AS_OPERATOR, {}):
        state = client().get(f"{setup.url}/ui/state", headers=headers, timeout=10).json()
        assert state["engines"][1]["handoffs"]["tcp"]["hidden_bytes"] == HIDDEN
    done = status(setup.url)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if " tcp " in line]
    assert "60.0%" in row.split(), done.stdout


def test_engines_pairings_and_requests(make: Make) -> None:
    setup = make(section={"pairing": {"local_prefill_tokens": 20}})
    setup.decode.handoffs = {"loaded": 5, "failed": 1}
    for length in (4, 30, 30):
        assert complete(setup, list(range(length))).status_code == 200
    until(lambda: state_of(setup)["engines"][1]["handoffs"] != {})  # it is up to a second old
    state = state_of(setup)
    prefill, decode = state["engines"]
    assert (prefill["name"], prefill["state"]) == ("prefill-0", "up")
    assert (decode["name"], decode["running"], decode["kv_usage"]) == ("decode-0", 3, 0.25)
    assert decode["leases"] == 2
    assert decode["handoffs"] == {"tcp": {"loaded": 5, "failed": 1}}
    assert decode["load_failures"] == {"peer_lost": 1}
    router = state["router"]
    assert router["requests"] == {"200": 3}
    assert router["in_flight"] == {"prefill": 0, "decode": 0}
    assert router["pairings"][0]["requests"] + router["local"].get("prefix_known", 0) == 2
    assert router["local"]["short_prompt"] == 1
    assert router["seconds"]["ttft"]["count"] == 3
    assert state["failures"] == []


def test_what_caches_spare_and_share(make: Make) -> None:
    setup = sharing.start(make, "decode-0")
    setup.prefill.cached = 200  # of the 240 that were promised
    none = state_of(setup)["router"]
    assert none["caches"] == dict.fromkeys(
        ("prompt_tokens", "expected_tokens", "reported_tokens"), 0
    )
    assert none["sharing"] == {"sources": {}, "tokens": 0}
    assert complete(setup, sharing.PROMPT).status_code == 200
    until(lambda: state_of(setup)["router"]["sharing"]["tokens"] > 0)
    setup.decode.status = 500
    until(lambda: complete(setup, sharing.PROMPT).status_code >= 500)
    until(lambda: "refused" in state_of(setup)["router"]["sharing"]["sources"])
    router = state_of(setup)["router"]
    assert router["sharing"]["tokens"] == sharing.HELD
    assert router["sharing"]["sources"]["leased"] == 1
    assert router["caches"]["expected_tokens"] == sharing.HELD
    asked = router["caches"]["prompt_tokens"] / len(sharing.PROMPT)
    assert asked == int(asked) >= 2
    assert router["caches"]["reported_tokens"] == 200 * asked
    shown = status(setup.url).stdout
    assert "fetched from other engines' caches: 240 tokens; engines asked: leased 1" in shown
    assert f"({200 / len(sharing.PROMPT):.1%})" in shown


def test_a_deployment_that_shares_no_caches_shows_none(setup: Setup) -> None:
    assert complete(setup).status_code == 200
    router = state_of(setup)["router"]
    assert (router["caches"], router["sharing"]) == (None, None)
    assert "caches" not in status(setup.url).stdout


def test_failures_name_the_request_and_no_address(make: Make) -> None:
    setup = make(limits={"queue_timeout_s": 0.1})
    setup.loop.run(setup.decode.stop())
    answer = complete(setup)
    assert answer.status_code == 503
    until(lambda: state_of(setup)["failures"] != [])
    text = client().get(f"{setup.url}/ui/state", headers=AS_OPERATOR, timeout=10).text
    failure = json.loads(text)["failures"][0]
    assert failure["status"] == 503
    assert failure["id"] == answer.headers["x-request-id"]
    assert failure["why"]
    for engine in setup.endpoints:
        assert engine.url.partition("//")[2] not in text


def test_an_engine_that_is_gone_is_shown_at_once(setup: Setup) -> None:
    assert len(state_of(setup)["engines"]) == 2
    setup.loop.run(setup.server.replace(setup.endpoints[:1], {"decode-0": Away("starts again")}))
    engines = {engine["name"]: engine["state"] for engine in state_of(setup)["engines"]}
    assert engines == {"prefill-0": "up", "decode-0": "starts again"}


def test_many_viewers_cost_one_scrape_a_second(setup: Setup) -> None:
    documents = {json.dumps(state_of(setup)) for _ in range(5)}
    assert len(documents) <= 2


def test_the_command(setup: Setup) -> None:
    complete(setup)
    shown = status(setup.url)
    assert shown.returncode == 0, shown.stderr
    for word in ("prefill-0", "decode-0", "up", "25.0%", "Pairings", "1 x 200"):
        assert word in shown.stdout
    assert json.loads(status(setup.url, "--json").stdout)["router"]["requests"] == {"200": 1}

    setup.loop.run(setup.server.replace(setup.endpoints[:1], {"decode-0": Away("starts again")}))
    gone = status(setup.url)
    assert gone.returncode == 1
    assert "starts again" in gone.stdout

    nobody = status("http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "error: http://127.0.0.1:9: " in nobody.stderr
    assert "Traceback" not in nobody.stderr
    assert status("no-url").returncode == 2
