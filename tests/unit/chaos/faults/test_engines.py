"""The judge of `disagg bench faults`, without engines."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx

from disagg.chaos.faults.connectors import REQUEST_ID
from disagg.chaos.faults.engines import MOST_HUNG, Engines, Outcome, _post
from disagg.testing.vllm_server import VllmServer


def test_a_kind_ends_when_three_answers_in_a_row_of_requests_have_hung() -> None:
    asked = list[int]()

    def hangs(number: int) -> list[Outcome]:
        asked.append(number)
        if number == 1:
            return [Outcome.RIGHT]
        raise httpx.ReadTimeout("late")

    engines = object.__new__(Engines)
    found = engines.alone([partial(hangs, number) for number in range(9)])
    assert MOST_HUNG == 3
    assert asked == [0, 1, 2, 3]
    assert found.count(Outcome.HUNG) == 3
    assert found.count(Outcome.RIGHT) == 1


def test_the_request_id_is_a_header_and_no_param(monkeypatch: Any, tmp_path: Any) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(VllmServer, "post", lambda self, *args: sent.append(args))
    params = {REQUEST_ID: "one", "do_remote_decode": True}
    server = VllmServer("one", tmp_path)
    _post(server, {"prompt": [1]}, params)
    _post(server, {"prompt": [1]}, None)
    (_, body, _, headers), (_, plain, _, no_headers) = sent
    assert headers == {REQUEST_ID: "one"}
    assert body == {"prompt": [1], "kv_transfer_params": {"do_remote_decode": True}}
    assert (plain, no_headers) == ({"prompt": [1]}, None)
    assert REQUEST_ID in params  # the driver uses them a second time
