"""Sends the load of `disagg bench serve`: each request at its time, whatever became of others.

One event loop for all of it. It shares the machine with the engines, so it does little while it
measures: prepared bytes out, and of an answer the pieces as they come with their times; what they
say is read when the answer has ended. How late it was itself is part of what it reports.

A wrong or missing answer never counts as served: it has a `problem`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop

from disagg.bench.serve.trace import Ask
from disagg.router.upstream.http1 import Client, fields
from disagg.testing.openai_stream import ANSWER_S
from disagg.testing.vllm_server import completion

_PATH = "/v1/completions"
_HEADER = fields([(b"content-type", b"application/json")])
_CONNECT_S = 10.0
_DONE = "[DONE]"


@dataclass(frozen=True)
class RequestOutcome:
    """What became of one request. Seconds, from when it was due.

    `gaps`: between the chunks of its answer that carry tokens. A chunk is what came in one piece:
    several tokens in one are one gap, not several of zero. `late_s`: how late it was sent.
    """

    ask: Ask
    late_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps: Sequence[float] = ()
    problem: str | None = None

    @property
    def mean_gap_s(self) -> float:
        """Time for each token after the first, over the whole answer."""
        return (self.last_s - self.first_s) / max(1, self.ask.output_tokens - 1)


@dataclass(frozen=True)
class Batch:
    """All outcomes in the order of the load; seconds of all together, and of this process's CPU."""

    outcomes: list[RequestOutcome]
    wall_s: float
    cpu_s: float


def run(url: str, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Batch:
    """Send it all and wait for the answers, none of them for longer than `ANSWER_S`."""
    bodies = [_body(ask, prompt) for ask, prompt in zip(asks, prompts, strict=True)]
    return uvloop.run(_run(url, asks, bodies))


def _body(ask: Ask, prompt: list[int]) -> bytes:
    asked = completion(prompt, max_tokens=ask.output_tokens, stream=True)
    return msgspec.json.encode({"model": "tiny", **asked})


async def _run(url: str, asks: Sequence[Ask], bodies: Sequence[bytes]) -> Batch:
    client = Client(_CONNECT_S, round_s=0)  # what comes is timed when it comes
    began, cpu = time.perf_counter(), time.process_time()
    under_way = []
    try:
        for ask, body in zip(asks, bodies, strict=True):
            due = began + ask.at
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            under_way.append(asyncio.create_task(_one(client, url, ask, body, due)))
        outcomes = await asyncio.gather(*under_way)
    finally:
        client.close()
    return Batch(outcomes, time.perf_counter() - began, time.process_time() - cpu)


async def _one(client: Client, url: str, ask: Ask, body: bytes, due: float) -> RequestOutcome:
    late_s = time.perf_counter() - due
    reading = Reading()
    problem: str | None = None
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await client.post(url, _PATH, body, _HEADER, ANSWER_S)
            try:
                while piece := await answer.readany():
                    reading.pieces.append((time.perf_counter() - due, piece))
            finally:
                answer.close()
            if answer.status != 200:
                problem = f"{answer.status}: {reading.start()}"
    except TimeoutError:
        problem = f"no whole answer in {ANSWER_S:g} s"
    except ConnectionError as error:
        problem = str(error)
    if problem is None:
        try:
            chunks = reading.chunks()
        except ValueError as error:
            problem = str(error)
    if problem is None:
        count = sum(tokens for _, tokens in chunks)
        if count != ask.output_tokens:
            problem = f"{count} tokens came, {ask.output_tokens} were asked for"
    if problem is not None:
        return RequestOutcome(ask, late_s, problem=problem)
    times = [at for at, _ in chunks]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return RequestOutcome(ask, late_s, times[0], times[-1], gaps)


# ---- one answer ----------------------------------------------------------------------------


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw | None = None


@dataclass
class Reading:
    """The pieces of one streamed answer with the times at which they came."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def start(self) -> str:
        """What it began with, for people."""
        return b"".join(piece for _, piece in self.pieces)[:300].decode(errors="replace")

    def chunks(self) -> list[tuple[float, int]]:
        """Times and numbers of tokens, of the pieces that brought any.

        A token came with the piece that completed its event. Raises `ValueError` for an error
        event, for what is no event, and for a stream without its end.
        """
        found: list[tuple[float, int]] = []
        rest, done = b"", False
        for at, piece in self.pieces:
            *events, rest = (rest + piece).split(b"\n\n")
            tokens = 0
            for event in events:
                data = event.decode(errors="replace").removeprefix("data: ")
                if data == _DONE:
                    done = True
                else:
                    tokens += _tokens(data)
            if tokens:
                found.append((at, tokens))
        if not done:
            raise ValueError("the stream ended without [DONE]")
        return found


def _tokens(data: str) -> int:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no event: {data[:300]!r} ({error})") from error
    if event.error is not None:
        raise ValueError(bytes(event.error).decode(errors="replace"))
    return sum(len(choice.token_ids or ()) for choice in event.choices)
