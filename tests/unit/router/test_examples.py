"""The examples that use a router, run against one; and a router in front of routers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import httpx
import pytest
from unit.router.conftest import Setup, leave, wait_for

from disagg.testing.http import client

EXAMPLES = Path(__file__).parents[3] / "examples"
Make = Callable[..., Setup]


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}


def loaded(name: str) -> Any:
    """An example as a module."""
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Batch:
    """Runs the script on a file of these lines."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self._input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.errors = folder / "out.jsonl.errors"
        self._url = f"{setup.url}/v1"

    def run(self, *lines: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        self._input.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        command = [sys.executable, EXAMPLES / "batch.py", self._input, self.output]
        options = ["--url", self._url, "--concurrency", "3"]
        return subprocess.run(
            [*map(str, command), *options], capture_output=True, text=True, check=False, timeout=60
        )

    def answers(self) -> dict[str, Any]:
        lines = [json.loads(each) for each in self.output.read_text().splitlines()]
        assert len({each["custom_id"] for each in lines}) == len(lines)
        return {each["custom_id"]: each["response"] for each in lines}


@pytest.fixture
def batch(tmp_path: Path, setup: Setup) -> Batch:
    return Batch(tmp_path, setup)


def test_batch_resumes(batch: Batch, setup: Setup) -> None:
    lines = [line(str(number), prompt=f"{number}") for number in range(10)]
    done = batch.run(*lines, line("bad", "/v1/missing"))
    assert (done.returncode, "10 now, 1 failed" in done.stderr) == (1, True)
    answers = batch.answers()
    assert sorted(answers) == sorted(str(number) for number in range(10))
    for number in range(10):
        assert answers[str(number)]["status_code"] == 200
        assert answers[str(number)]["body"]["role"] == "decode"
    failed = json.loads(batch.errors.read_text())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 403)

    # Killed in the middle of a line, which is repaired.
    whole = batch.output.read_text()
    batch.output.write_text(f'{whole}{{"custom_id": "ha')
    asked = len(setup.decode.bodies)
    done = batch.run(*lines, line("bad"), line("half", prompt="again"))
    assert done.returncode == 0, done.stderr
    assert len(setup.decode.bodies) == asked + 2
    assert set(batch.answers()) == {*answers, "bad", "half"}
    assert not batch.errors.exists()


def test_batch_retries_while_engines_fail(batch: Batch, setup: Setup) -> None:
    setup.decode.status = 503
    mended = threading.Timer(0.8, lambda: setattr(setup.decode, "status", 200))
    mended.start()
    done = batch.run(*(line(str(number)) for number in range(4)))
    mended.join()
    assert done.returncode == 0, done.stderr
    assert {answer["status_code"] for answer in batch.answers().values()} == {200}


def test_batch_refuses_wrong_lines(tmp_path: Path) -> None:
    example, path, good = loaded("batch"), tmp_path / "in.jsonl", line("1")
    for wrong, words in (
        (good, "custom_id '1' is there twice"),
        ({"custom_id": "2"}, "in.jsonl:3: KeyError('url')"),
        ({**line("2"), "body": []}, "in.jsonl:3: AttributeError"),
        (line("2", stream=True), "body.stream"),
        (line("2", "http://elsewhere/v1/completions"), "only POST to /v1/..."),
    ):
        path.write_text(f"{json.dumps(good)}\n\n{json.dumps(wrong)}\n")
        with pytest.raises(SystemExit, match=re.escape(words)):
            list(example.requests_in(path))


GATEWAY = """
port: 0
models:
  - name: tiny
    engines: {{decode: [{0}]}}
  - name: wide
    engines: {{decode: [{1}]}}
    limits: {{max_prompt_tokens: 16384}}
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs `disagg router` in front of the deployments at these addresses, with `more` settings;
    returns its URL."""
    running: list[subprocess.Popen[str]] = []

    def start(*addresses: str, more: str = "") -> str:
        text = GATEWAY.format(*addresses, *(["http://127.0.0.1:9"] if len(addresses) < 2 else []))
        (tmp_path / "router.yaml").write_text(f"{text}\n{more}")
        command = ["-m", "disagg.cli", "router", "--config", str(tmp_path / "router.yaml")]
        out = tmp_path / "router.out"
        with out.open("w") as log:
            running.append(
                subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, text=True)
            )
        ready = re.compile(r"Ready: (\S+)/v1")
        assert wait_for(lambda: ready.search(out.read_text()) or running[0].poll(), 240)
        found = ready.search(out.read_text())
        assert found is not None, out.read_text()
        return found[1]

    yield start
    for process in running:
        process.terminate()
        process.wait(60)


LIMITS = "limits: {max_prompt_tokens: 40000}"


@pytest.mark.parametrize("processes", [1, 2])
def test_two_models_behind_one_address(
    make: Make, gateway: Callable[..., str], processes: int
) -> None:
    one, other = make(model="tiny"), make(model="wide")
    url = gateway(one.url, f"{other.url}/v1", more=f"processes: {processes}\n{LIMITS}")
    listed = client().get(f"{url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "wide"]
    for setup, name in ((one, "tiny"), (other, "wide"), (other, "wide")):
        before = len(setup.decode.bodies)
        body = {"model": name, "prompt": "x", "stream": True}
        with client().stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.read().count(b"data: ") >= setup.decode.chunks
        assert len(setup.decode.bodies) == before + 1
        assert setup.decode.bodies[-1]["model"] == name
        assert len(setup.prefill.bodies) == len(setup.decode.bodies)  # its router paired them
    refused = client().post(f"{url}/v1/completions", json={"model": "other", "prompt": "x"})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].endswith("there are: tiny, wide")
    assert client().post(f"{url}/v1/completions", content=b"[]").status_code == 400
    # A model has the settings of the router besides its own, in each process.
    for name, words, status in (
        ("tiny", 20_000, 200),
        ("tiny", 60_000, 400),
        ("wide", 20_000, 400),
    ) * 3:
        body = {"model": name, "prompt": "word " * words}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=20)
        assert answer.status_code == status
    metrics = client().get(f"{url}/metrics").text
    assert re.search(r'disagg_router_queued{.*deployment="wide"', metrics)
    # As `disagg status` reads it.
    told = subprocess.run(
        [sys.executable, "-m", "disagg.cli", "status", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "wide/decode-0" in told.stdout


def test_a_client_that_leaves_the_gateway_frees_the_engine(
    make: Make, gateway: Callable[..., str]
) -> None:
    setup = make()
    url = gateway(setup.url)
    setup.decode.gate = threading.Event()
    leave(url, {"model": "tiny", "prompt": "x"}, lambda: setup.decode.bodies)
    assert setup.decode.left.wait(10)
