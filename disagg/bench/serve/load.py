"""Sends the load of `disagg bench serve`: each request at its time, answered or not; of
conversations, each turn some time after the answer before it.

One event loop sends all requests. It shares the machine with the engines, so it does little while
it measures: it sends prepared bytes and keeps the pieces of an answer with their times. It parses
them after the end of the answer. It reports its own lateness.

A wrong or missing answer never counts as served: it has a `problem`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
import uvloop

from disagg.bench.serve.conversations import Conversation, Exchange
from disagg.bench.serve.trace import Ask
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream.http1 import Client, fields
from disagg.testing.openai_stream import ANSWER_S
from disagg.testing.vllm_server import completion

_PATH = "/v1/completions"
_HEADER = fields([(b"content-type", b"application/json")])
_CONNECT_S = 10.0
_DONE = "[DONE]"
_EARLIER = "an earlier turn of the conversation failed"


@dataclass(frozen=True)
class RequestOutcome:
    """How one request ended. Times are seconds from the time at which it was due.

    `gaps`: between the chunks of its answer that carry tokens. A chunk is one read: several tokens
    in one chunk are one gap, not several gaps of zero. `late_s`: how late it was sent.
    """

    ask: Ask
    late_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    gaps: Sequence[float] = ()
    problem: str | None = None
    answer: Sequence[int] = ()
    """Its token ids."""

    @property
    def mean_gap_s(self) -> float:
        """Mean time per token after the first."""
        return (self.last_s - self.first_s) / max(1, self.ask.output_tokens - 1)


@dataclass(frozen=True)
class Batch:
    """All outcomes in the order of the load. Seconds: wall time, and CPU time of this process.
    `exchanges`: of conversations, what was sent and answered."""

    outcomes: list[RequestOutcome]
    wall_s: float
    cpu_s: float
    exchanges: Sequence[Exchange] = ()


_Post: TypeAlias = Callable[[Ask, bytes, float], Coroutine[Any, Any, RequestOutcome]]
"""Sends one request, which is due at this time. Never raises for what the server does."""


def run(url: str, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Batch:
    """Send all and wait for each answer for at most `ANSWER_S`."""
    bodies = [_body(ask, prompt) for ask, prompt in zip(asks, prompts, strict=True)]
    return uvloop.run(_run(url, asks, bodies))


def _body(ask: Ask, prompt: list[int]) -> bytes:
    asked = completion(prompt, max_tokens=ask.output_tokens, stream=True)
    return msgspec.json.encode({"model": "tiny", **asked})


async def _run(url: str, asks: Sequence[Ask], bodies: Sequence[bytes]) -> Batch:
    began = time.perf_counter()

    async def send(post: _Post) -> list[RequestOutcome]:
        under_way = []
        for ask, body in zip(asks, bodies, strict=True):
            due = began + ask.at
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            under_way.append(asyncio.create_task(post(ask, body, due)))
        return await asyncio.gather(*under_way)

    return await _measured(url, send)


async def _measured(url: str, send: Callable[[_Post], Awaitable[list[RequestOutcome]]]) -> Batch:
    client = Client(_CONNECT_S, round_s=0)  # no gathering of chunks: it would change their times
    began, cpu = time.perf_counter(), time.process_time()
    target = EngineEndpoint("target", "decode", url)

    def post(ask: Ask, body: bytes, due: float) -> Coroutine[Any, Any, RequestOutcome]:
        return _one(client, target, ask, body, due)

    try:
        outcomes = await send(post)
    finally:
        client.close()
    return Batch(outcomes, time.perf_counter() - began, time.process_time() - cpu)


# ---- conversations ---------------------------------------------------------------------------


def converse(url: str, conversations: Sequence[Conversation]) -> Batch:
    """Hold them all, at once where their times are. The outcomes are those of the first one's
    turns, then the second one's."""
    return uvloop.run(_converse(url, conversations))


async def _converse(url: str, conversations: Sequence[Conversation]) -> Batch:
    began, exchanges = time.perf_counter(), list[Exchange]()

    async def send(post: _Post) -> list[RequestOutcome]:
        held = (_hold(post, one, began, exchanges) for one in conversations)
        return list(itertools.chain(*await asyncio.gather(*held)))

    batch = await _measured(url, send)
    return replace(batch, exchanges=exchanges)


async def _hold(
    post: _Post, conversation: Conversation, began: float, exchanges: list[Exchange]
) -> list[RequestOutcome]:
    """One turn after another. What follows a turn that failed fails as well: nobody knows what
    would have been said. `began`: the time at which the load did."""
    history, outcomes, due = list[int](), list[RequestOutcome](), began + conversation.at
    for turn in conversation.turns:
        history += turn.new
        due += turn.waits_s
        ask = Ask(round(due - began, 6), len(history), turn.output_tokens)
        if outcomes and outcomes[-1].problem is not None:
            outcomes.append(RequestOutcome(ask, 0.0, problem=_EARLIER))
            continue
        body = _body(ask, history)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        sent = time.perf_counter()
        outcome = await post(ask, body, due)
        outcomes.append(outcome)
        if outcome.problem is None:
            exchanges.append(Exchange(sent, history[:], outcome.answer))
            history += outcome.answer
            due += outcome.last_s
    return outcomes


# ---- one request -----------------------------------------------------------------------------


async def _one(
    client: Client, target: EngineEndpoint, ask: Ask, body: bytes, due: float
) -> RequestOutcome:
    late_s = time.perf_counter() - due
    reading = Reading()
    problem: str | None = None
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await client.post(target, _PATH, body, _HEADER, ANSWER_S)
            try:
                while piece := await answer.readany():
                    reading.pieces.append((time.perf_counter() - due, piece))
            finally:
                answer.close()
            if answer.status != 200:
                problem = f"{answer.status}: {reading.start()}"
    except TimeoutError:
        problem = f"no complete answer in {ANSWER_S:g} s"
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
    return RequestOutcome(ask, late_s, times[0], times[-1], gaps, answer=reading.ids)


# ---- one answer ----------------------------------------------------------------------------


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: msgspec.Raw | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass
class Reading:
    """The pieces of one streamed answer, with the times of their arrival."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """The token ids of the answer, once `chunks` was called."""

    def start(self) -> str:
        """The first characters of the answer, for an error message."""
        return b"".join(piece for _, piece in self.pieces)[:300].decode(errors="replace")

    def chunks(self) -> list[tuple[float, int]]:
        """Times and numbers of tokens of the pieces with tokens.

        A token arrives with the piece that completes its event. Raises `ValueError` for an error
        event, for data that is not an event, and for a stream without `[DONE]`.
        """
        found: list[tuple[float, int]] = []
        rest, done = b"", False
        self.ids.clear()
        for at, piece in self.pieces:
            *events, rest = (rest + piece).split(b"\n\n")
            before = len(self.ids)
            for event in events:
                data = event.decode(errors="replace").removeprefix("data: ")
                if data == _DONE:
                    done = True
                else:
                    self.ids += _tokens(data)
            if len(self.ids) > before:
                found.append((at, len(self.ids) - before))
        if not done:
            raise ValueError("the stream ended without [DONE]")
        return found


def _tokens(data: str) -> list[int]:
    try:
        event = _decode_event(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not an event: {data[:300]!r} ({error})") from error
    if event.error is not None:
        raise ValueError(bytes(event.error).decode(errors="replace"))
    return [token for choice in event.choices for token in choice.token_ids or ()]
