"""SDKs that others wrote, unchanged: Anthropic's for Python and OpenAI's for Node.

Each asks for a whole answer, a stream and an unknown model, and leaves in the middle of both.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import anthropic
import pytest
from unit.router.conftest import wait_for
from unit.router.server.api_engine import TEXT, WORDS, ApiEngine
from unit.router.server.conftest import Models, StartModels

TIMEOUT_S = 60
NO_MODEL = "The model `other` does not exist; there are: org/chat"
QUESTION = "Wörter?"
ASK: dict[str, Any] = {
    "model": "org/chat",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": QUESTION}],
}
# The newest for Node 20. Without scripts, and with the hash of what was looked at.
OPENAI = {
    "version": "6.30.1",
    "integrity": "sha512-5bkK9GoQMd8j4a0TeY95AIC7FtGP38HlfO+YvRq4TkEndHLI1iR8ct9wajmsAMw+"
    "G/QcPOZnqzhhsUT2GKUWkA==",
}
CACHE = Path(__file__).parents[4] / ".cache" / "npm-openai"
# What npm says where no registry answers, rather than where it has not what is asked for.
NO_REGISTRY = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "EHOSTUNREACH",
               "ENETUNREACH", "ERR_SOCKET_TIMEOUT")  # fmt: skip

NODE = """
const OpenAI = require("openai");
const [url, question, turn] = process.argv.slice(1);
const client = new OpenAI({ baseURL: url, apiKey: "any", maxRetries: 0, timeout: 30000 });
const body = { model: "org/chat", messages: [{ role: "user", content: question }] };
const say = (content) => console.log(JSON.stringify(content));
const turns = {
  async whole() {
    const { data, response } = await client.chat.completions.create(body).withResponse();
    say([data.choices[0].message.content, data.usage.total_tokens]);
    say(response.headers.get("x-request-id") !== null);
  },
  async stream() {
    const words = [];
    let reason = null;
    for await (const part of await client.chat.completions.create({ ...body, stream: true })) {
      if (part.choices[0].delta.content) words.push(part.choices[0].delta.content);
      reason = part.choices[0].finish_reason ?? reason;
    }
    say([words, reason]);
  },
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    say(names);
  },
  async error() {
    for (const stream of [false, true]) {
      try {
        await client.chat.completions.create({ ...body, model: "other", stream });
      } catch (error) {
        say([error instanceof OpenAI.NotFoundError, error.status, error.param, error.message]);
      }
    }
  },
  async leaves_stream() {
    const stream = await client.chat.completions.create({ ...body, stream: true });
    for await (const part of stream) if (part.choices[0].delta.content) break;
    say("left");
    await new Promise((done) => process.stdin.once("data", done));
  },
  async leaves_whole() {
    const stop = new AbortController();
    const answer = client.chat.completions.create(body, { signal: stop.signal });
    process.stdin.once("data", () => stop.abort());
    try {
      await answer;
    } catch (error) {
      say(error instanceof OpenAI.APIUserAbortError);
    }
    await new Promise((done) => process.stdin.once("data", done));
  },
};
turns[turn]().then(() => process.exit(0));
"""


@pytest.fixture
def models(start_models: StartModels) -> Models:
    return start_models(names=["org/chat"], kind=ApiEngine)


def decode(models: Models) -> ApiEngine:
    engine = models.decode("org/chat")
    assert isinstance(engine, ApiEngine)
    return engine


# ---- Anthropic's for Python ------------------------------------------------------------------


@pytest.fixture
def claude(models: Models) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=models.url, api_key="any", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        yield client


def test_anthropic_whole(claude: anthropic.Anthropic, models: Models) -> None:
    answer = claude.messages.create(**ASK)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", TEXT)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 3)
    (sent,) = decode(models).bodies
    assert sent["messages"][0]["content"] == QUESTION
    assert sent["kv_transfer_params"]


def test_anthropic_streams(claude: anthropic.Anthropic, models: Models) -> None:
    with claude.messages.stream(**ASK) as stream:
        assert list(stream.text_stream) == list(WORDS)
        answer = stream.get_final_message()
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 3)
    kinds = [event.type for event in claude.messages.create(**ASK, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_delta") == len(WORDS)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_unknown_model(claude: anthropic.Anthropic, models: Models, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.messages.create(**ASK | {"model": "other", "stream": stream})
    assert refused.value.status_code == 404
    error = refused.value.body["error"]  # type: ignore[index]
    assert (error["type"], error["message"]) == ("not_found_error", NO_MODEL)
    assert not decode(models).bodies


def test_anthropic_leaves_a_stream(claude: anthropic.Anthropic, models: Models) -> None:
    engine = decode(models)
    engine.endless = True
    with claude.messages.stream(**ASK) as stream:
        assert next(iter(stream.text_stream)) == WORDS[0]
        assert not engine.left.is_set()
    # The client itself lives on, and its other requests are answered.
    assert engine.left.wait(TIMEOUT_S)
    engine.endless = False
    assert claude.messages.create(**ASK).stop_reason == "end_turn"


def test_anthropic_leaves_a_whole_answer(models: Models) -> None:
    engine = decode(models)
    engine.endless = True

    async def ask_and_leave() -> None:
        async with anthropic.AsyncAnthropic(
            base_url=models.url, api_key="any", max_retries=0, timeout=TIMEOUT_S
        ) as client:
            asked = asyncio.create_task(client.messages.create(**ASK))
            assert await asyncio.to_thread(wait_for, lambda: engine.bodies, TIMEOUT_S)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert await asyncio.to_thread(engine.left.wait, TIMEOUT_S)

    asyncio.run(ask_and_leave())


# ---- OpenAI's for Node -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder `node_modules` with the SDK, installed once."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here")
    modules = CACHE / OPENAI["version"] / "node_modules"
    if not modules.exists():
        _install(modules.parent)
    return modules


def _install(folder: Path) -> None:
    """Install into a folder that appears whole or not at all. Skips where there is no registry."""
    packages: dict[str, Any] = {
        "": {"dependencies": {"openai": OPENAI["version"]}},
        "node_modules/openai": OPENAI,
    }
    lock = {"name": "clients", "lockfileVersion": 3, "requires": True, "packages": packages}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        new = Path(name) / "new"
        new.mkdir()
        (new / "package.json").write_text(json.dumps({"name": "clients", **packages[""]}))
        (new / "package-lock.json").write_text(json.dumps(lock))
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0")
        done = subprocess.run(
            ["npm", "ci", *options],
            cwd=new,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if any(word in done.stderr for word in NO_REGISTRY):
            reason = " ".join(done.stderr.split())[:300]
            pytest.skip(f"openai for Node is not installed, and no registry answers: {reason}")
        assert done.returncode == 0, done.stderr
        new.rename(folder)


class Node:
    """One turn of the script, in a process that stays until it is told to go."""

    def __init__(self, packages: Path, models: Models, turn: str) -> None:
        self._process = subprocess.Popen(
            ["node", "-e", NODE, f"{models.url}/v1", QUESTION, turn],
            env={**os.environ, "NODE_PATH": str(packages)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def next_line(self) -> Any:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], TIMEOUT_S)[0]
        return json.loads(self._process.stdout.readline())

    def lines(self) -> list[Any]:
        """All that it says until its end, which must be a good one."""
        said, _ = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0
        return [json.loads(line) for line in said.splitlines()]


def test_openai_for_node_answers(packages: Path, models: Models) -> None:
    with Node(packages, models, "whole") as node:
        assert node.lines() == [[TEXT, 8], True]
    (sent,) = decode(models).bodies
    assert sent["messages"][0]["content"] == QUESTION
    assert sent["kv_transfer_params"]
    with Node(packages, models, "stream") as node:
        assert node.lines() == [[list(WORDS), "stop"]]
    with Node(packages, models, "models") as node:
        assert node.lines() == [["org/chat"]]


def test_openai_for_node_unknown_model(packages: Path, models: Models) -> None:
    with Node(packages, models, "error") as node:
        assert node.lines() == [[True, 404, "model", f"404 {NO_MODEL}"]] * 2
    assert not decode(models).bodies


def test_openai_for_node_leaves_a_stream(packages: Path, models: Models) -> None:
    engine = decode(models)
    engine.endless = True
    with Node(packages, models, "leaves_stream") as node:
        assert node.next_line() == "left"
        assert engine.left.wait(TIMEOUT_S)  # the process still runs
        node.go_on()
        assert node.lines() == []


def test_openai_for_node_leaves_a_whole_answer(packages: Path, models: Models) -> None:
    engine = decode(models)
    engine.endless = True
    with Node(packages, models, "leaves_whole") as node:
        assert wait_for(lambda: engine.bodies, TIMEOUT_S)
        assert not engine.left.is_set()
        node.go_on()
        assert node.next_line() is True
        assert engine.left.wait(TIMEOUT_S)
        node.go_on()
        assert node.lines() == []
