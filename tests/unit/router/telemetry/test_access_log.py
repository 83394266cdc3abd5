"""Every request has one id in all logs and headers, and one line in the access log."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from unit.router.conftest import Setup

from disagg.credentials import ApiKey
from disagg.testing.http import client

Make = Callable[..., Setup]
BODY = {"model": "m", "prompt": "x", "stream": False}


class Lines(list[dict[str, Any]]):
    """The lines of the access log that were read so far."""

    def __init__(self, output: pytest.CaptureFixture[str]) -> None:
        self._output = output

    def read(self) -> None:
        self.extend(json.loads(line) for line in self._output.readouterr().out.splitlines())


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return Lines(capsys)


def post(setup: Setup, body: Any = None, **headers: str) -> httpx.Response:
    url = f"{setup.url}/v1/completions"
    return client().post(url, json=BODY if body is None else body, headers=headers, timeout=20)


def logged(lines: Lines, count: int) -> Lines:
    """Wait for so many lines: a client gets its answer a little earlier."""
    deadline = time.monotonic() + 5
    while len(lines) < count and time.monotonic() < deadline:
        time.sleep(0.01)
        lines.read()
    assert len(lines) == count
    return lines


def test_the_id_goes_everywhere(setup: Setup, lines: Lines) -> None:
    answer = post(setup, **{"x-request-id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert [engine.headers[0]["x-request-id"] for engine in (setup.prefill, setup.decode)] == [
        "mine-1"
    ] * 2
    (line,) = logged(lines, 1)
    assert line["id"] == "mine-1"
    assert (line["prefill"], line["decode"], line["status"]) == ("prefill-0", "decode-0", 200)
    assert 0 <= line["prefill_ms"] <= line["first_byte_ms"] <= line["total_ms"] < 20_000
    assert "local" not in line


@pytest.mark.parametrize("bad", ["two words", "x" * 200, ""])
def test_an_invalid_id_is_replaced(setup: Setup, bad: str) -> None:
    given = post(setup, **{"x-request-id": bad}).headers["x-request-id"]
    assert given != bad
    assert len(given) == 32


def test_lines_of_failures_and_retries(make: Make, lines: Lines) -> None:
    setup = make(api_keys=[ApiKey("ann", "right"), ApiKey(None, "plain")])
    assert post(setup).status_code == 401
    key = {"authorization": "Bearer right"}
    setup.prefill.status = 503
    assert post(setup, **key).status_code == 200
    assert post(setup, [], **key).status_code == 400
    assert [line["status"] for line in logged(lines, 3)] == [401, 200, 400]
    assert lines[1]["local"] == "prefill_failed"
    assert len({line["id"] for line in lines}) == 3
    assert [line.get("key") for line in lines] == [None, "ann", "ann"]
    assert post(setup, authorization="Bearer plain").status_code == 200
    assert "key" not in logged(lines, 4)[-1]
    assert "right" not in json.dumps(lines)


def test_on_standard_output_unless_switched_off() -> None:
    code = (
        "import asyncio\n"
        "from disagg.router.telemetry.access_log import AccessLog, Record\n"
        "async def main():\n"
        "    AccessLog(enabled=True).write(Record('/a', '1'), 200)\n"
        "    AccessLog(enabled=False).write(Record('/b', '2'), 200)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [json.loads(line)["route"] for line in done.stdout.splitlines()] == ["/a"]


def test_a_request_whose_line_cannot_be_written_is_answered(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left")

    monkeypatch.setattr(sys, "stdout", Full())
    with caplog.at_level(logging.WARNING):
        assert [post(setup).status_code for _ in range(2)] == [200, 200]
    assert [r.getMessage() for r in caplog.records if "access log" in r.getMessage()] == [
        "cannot write the access log: no space left"
    ]
