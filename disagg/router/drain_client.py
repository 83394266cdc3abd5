"""`disagg drain`: ask a running router to refuse new requests; optionally wait for the rest."""

from __future__ import annotations

import time
from http.client import HTTPException
from typing import Any

from disagg.errors import DisaggError
from disagg.router.operator_client import OperatorClient
from disagg.router.server.drain import PATH

POLL_S = 0.2


def run(client: OperatorClient, *, wait: bool, undo: bool, timeout_s: float) -> int:
    """Start or undo a drain, print its state, wait if asked. Returns 0; raises DisaggError."""
    with client:
        try:
            state = client.ask("DELETE" if undo else "POST", PATH)
            print(_summary(state), flush=True)
            if wait and not undo:
                _wait(client, state, timeout_s)
                print("drained")
        except (OSError, HTTPException) as error:
            raise client.unreached(error) from error
    return 0


def _wait(client: OperatorClient, state: dict[str, Any], timeout_s: float) -> None:
    """Return when no request is in flight, or when the router has exited, as it then does."""
    deadline = time.monotonic() + timeout_s
    while state["in_flight"]:
        if time.monotonic() > deadline:
            raise DisaggError(f"not drained in {timeout_s:g} s; {_summary(state)}")
        time.sleep(POLL_S)
        try:
            state = client.ask("GET", PATH)
        except (ConnectionError, HTTPException):
            return


def _summary(state: dict[str, Any]) -> str:
    mode = "draining" if state["draining"] else "taking requests"
    return f"{mode}, {state['in_flight']} in flight"
