"""Two engines with a connector between them, one without, and what their answers are worth."""

from __future__ import annotations

import contextlib
import enum
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import httpx

from disagg.chaos.faults.connectors import LEASE_S, REQUEST_ID, Connector, Params
from disagg.errors import StartupError
from disagg.testing.followed_legs import is_idle
from disagg.testing.vllm_server import Started, VllmServer, completion, token_ids
from disagg.testing.waiting import eventually

BLOCK_SIZE, NUM_BLOCKS, LONGEST = 32, 100, 1536
VOCABULARY = 4096
ANSWER_S = 30.0
"""An answer that takes longer has hung. The deadlines of all connectors are shorter."""
MOST_HUNG = 3
"""Of the requests that are sent one after the other: more say the same, and take 30 s each."""
KEPT_S = 3.0 * LEASE_S
"""Blocks that are in use for longer, when no request is left, are kept for ever."""
_ARGS = (
    *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS)),
    *("--max-model-len", str(LONGEST), "--max-num-seqs", "16"),
)
# Decode has no prefix cache, so that each reference is used.
_DECODE_ARGS = (*_ARGS, "--no-enable-prefix-caching")
# Steps end within blocks.
_STEPS_ARGS = (*_ARGS, "--max-num-batched-tokens", "80")
Start = Callable[[Sequence[str], dict[str, str], Path], Started]
Task = Callable[[], "list[Outcome]"]


class Outcome(enum.StrEnum):
    """What became of one request."""

    RIGHT = "right"
    COMPUTED = "computed locally"
    REFUSED = "refused clearly"
    WRONG = "wrong tokens"
    HUNG = "hung"
    DIED = "engine died"
    KEPT = "blocks kept"
    """Of an engine, not of a request: it gave blocks back to nobody. Looked at for ours only, as an
    idle engine with another connector counts no blocks."""


class NotPlayed(Exception):
    """This kind says nothing about this connector, and why."""


class Prompts:
    """Prompts that no engine has seen, from one seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def __call__(self, tokens: int) -> list[int]:
        return self._draw.choices(range(10, VOCABULARY), k=tokens)


class Engines:
    """The engines of one connector, and a plain one whose answers are the right ones."""

    def __init__(
        self, connector: Connector, models: tuple[Path, Path], folder: Path, start: Start
    ) -> None:
        self.connector, self._models, self._folder, self._start = connector, models, folder, start
        self.prompts = Prompts(7)
        self._in_steps = False
        self.left, self.right = self._engine("left"), self._engine("right")
        self.plain = VllmServer("plain", models[0], folder / "plain.log", None, _ARGS, start=start)
        self._at_once = False
        self._plain: list[int] = []  # tokens of prompts that are not handed off

    def _engine(self, name: str, model: int = 0) -> VllmServer:
        args = _DECODE_ARGS if name == "right" else _STEPS_ARGS if self._in_steps else _ARGS
        config = {**self.connector.config(self._folder), "kv_role": "kv_both"}
        log = self._folder / f"{self.connector.name}-{name}.log"
        env = {"VLLM_SERVER_DEV_MODE": "1", **self.connector.env()}
        folder, holds = self._models[model], args == _STEPS_ARGS
        return VllmServer(
            name, folder, log, config, args, env=env, can_hold=holds, start=self._start
        )

    def __enter__(self) -> Engines:
        try:
            self._launch(self.left, self.right, self.plain)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for server in (self.left, self.right, self.plain):
            server.stop()

    def _launch(self, *servers: VllmServer) -> None:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
            server.complete(self.prompts(300), max_tokens=2)  # an engine's first step sets it up

    # ---- faults ----------------------------------------------------------------------------

    def kill(self, server: VllmServer) -> None:
        """SIGKILL all processes of an engine."""
        assert server.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)

    def restart(self, name: str, model: int = 0) -> None:
        """A new engine in the place of `left` or `right`, on that checkpoint."""
        old: VllmServer = getattr(self, name)
        self.kill(old)
        old.stop()
        new = self._engine(name, model)
        setattr(self, name, new)
        self._launch(new)

    def compute_in_steps(self, wanted: bool) -> None:
        """Whether `left` computes a prompt in several steps, or in one. Changes it if need be."""
        if wanted is not self._in_steps:
            self._in_steps = wanted
            self.restart("left")

    def meet(self) -> None:
        """One handoff, however it ends: as in service, decode has fetched from prefill before."""
        self.alone([lambda: self.handoff(self.prompts(100))])

    def revive(self) -> list[str]:
        """Start again what does not serve. Returns its names."""
        dead = [name for name in ("left", "right") if not self.serves(getattr(self, name))]
        for name in dead:
            self.restart(name)
        return dead

    def kept(self) -> list[str]:
        """Names of the engines that keep blocks although no request is left."""
        if self.connector.follow is None:
            return []
        both = (self.left, self.right)
        return [one.name for one in both if not eventually(partial(is_idle, one), KEPT_S)]

    def serves(self, server: VllmServer) -> bool:
        """Whether it computes a prompt."""
        try:
            answer = server.post("/v1/completions", completion([5] * 40, max_tokens=1), timeout=20)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    # ---- the router's part -----------------------------------------------------------------

    def expected(self, prompt: Any, **more: Any) -> list[list[int]]:
        """The plain engine's answer."""
        return token_ids(self.plain.complete(prompt, **more))

    def prefill(self, prompt: Any, server: VllmServer | None = None, **more: Any) -> Params | None:
        """The prefill leg, on `left` unless another one is named. Returns the decode leg's params;
        None if there are none."""
        server, asked = server or self.left, self.connector.prefill()
        body = completion(prompt, **more) | {"max_tokens": 1, "n": 1}
        answer = _post(server, body, asked)
        answered = answer.json().get("kv_transfer_params") if answer.status_code == 200 else None
        return self.connector.decode(server.env, asked, answered)

    def decode(
        self,
        prompt: Any,
        params: Params | None,
        expected: list[list[int]],
        server: VllmServer | None = None,
        **more: Any,
    ) -> list[Outcome]:
        """The decode leg, on `right` unless another one is named: an outcome for each choice."""
        server = server or self.right
        count = len(expected)
        try:
            before = None if self._at_once else self._sources(server)
            answer = _post(server, completion(prompt, **more), params)
        except httpx.TimeoutException:
            return [Outcome.HUNG] * count
        except httpx.HTTPError:
            return [Outcome.DIED] * count
        if answer.status_code != 200:
            return [self._refusal(server, answer)] * count
        right = Outcome.RIGHT if before is None else _right(before, self._sources(server))
        return [
            right if got == wanted else Outcome.WRONG
            for got, wanted in zip(token_ids(answer.json()), expected, strict=True)
        ]

    def _sources(self, *servers: VllmServer) -> Counter[str]:
        """Prompt tokens so far that these engines computed, and that they loaded."""
        found: Counter[str] = Counter()
        for server in servers:
            for source in ("local_compute", "external_kv_transfer"):
                name = "vllm:prompt_tokens_by_source_total"
                with contextlib.suppress(httpx.HTTPError):
                    found[source] += int(server.metric(name, source=source))
        return found

    def without_handoff(self, prompt: list[int]) -> list[Outcome]:
        """A plain request to `right`. Empty if it ends well, as that says nothing of handoffs."""
        expected = self.expected(prompt)
        self._plain.append(len(prompt))
        good = (Outcome.RIGHT, Outcome.COMPUTED)
        return [one for one in self.decode(prompt, None, expected) if one not in good]

    def alone(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Run one after the other, until `MOST_HUNG` answers have hung."""
        found = list[Outcome]()
        for task in tasks:
            found += _outcomes(task)
            if found.count(Outcome.HUNG) >= MOST_HUNG:
                break
        return found

    def together(self, tasks: Sequence[Task], *servers: VllmServer) -> list[Outcome]:
        """Run all at once; they decode on `right`, or on these engines. How many right answers were
        computed follows from how many of all tokens were."""
        servers = servers or (self.right,)
        before, self._at_once = self._sources(*servers), True
        self._plain.clear()
        try:
            with ThreadPoolExecutor(len(tasks)) as pool:
                found = [one for each in pool.map(_outcomes, tasks) for one in each]
        finally:
            self._at_once = False
        moved = self._sources(*servers) - before
        moved["local_compute"] = max(0, moved["local_compute"] - sum(self._plain))
        right = [place for place, one in enumerate(found) if one is Outcome.RIGHT]
        share = moved["local_compute"] / max(1, moved.total())
        for place in right[: round(share * len(right))]:
            found[place] = Outcome.COMPUTED
        return found

    def _refusal(self, server: VllmServer, answer: httpx.Response) -> Outcome:
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return Outcome.REFUSED if is_json and self.serves(server) else Outcome.DIED

    def handoff(self, prompt: Any, **more: Any) -> list[Outcome]:
        """Both legs, one after the other."""
        expected = self.expected(prompt, **more)
        return self.decode(prompt, self.prefill(prompt, **more), expected, **more)


def _post(server: VllmServer, body: dict[str, Any], params: Params | None) -> httpx.Response:
    """One leg. `REQUEST_ID` is sent as a header."""
    rest = dict(params or {})
    headers = {REQUEST_ID: str(rest.pop(REQUEST_ID))} if REQUEST_ID in rest else None
    if rest:
        body = {**body, "kv_transfer_params": rest}
    return server.post("/v1/completions", body, ANSWER_S, headers)


def _right(before: Counter[str], after: Counter[str]) -> Outcome:
    computed, loaded = (
        after[name] - before[name] for name in ("local_compute", "external_kv_transfer")
    )
    return Outcome.COMPUTED if computed > loaded else Outcome.RIGHT


def _outcomes(task: Task) -> list[Outcome]:
    """What raises, because an engine is gone, has died."""
    try:
        return task()
    except (httpx.TimeoutException, TimeoutError):
        return [Outcome.HUNG]
    except (httpx.HTTPError, HTTPException, OSError, StartupError):
        return [Outcome.DIED]
