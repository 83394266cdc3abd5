"""The load of `disagg bench router`: clients on keep-alive connections, one request at a time each.

It shares the machine with the routers, so it does little: it sends prepared bytes, looks for the
end of an answer, and counts its events. A wrong answer ends the run and never counts as served.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from disagg.bench.router.fake_engine import CHUNKS, PARAMS

BATCH_S = 60.0
# A batch of slow answers ends after this time: no new request starts, those under way finish.
_NO_MORE_S = 5.0
MODEL = "fake"
_LAST_CHUNK = b"0\r\n\r\n"
# No prompt is sent twice: for a known prefix a router may leave a leg out.
_numbers = itertools.count()
_NUMBER, _DIGITS = b"@number@", b"%012d"


@dataclass(frozen=True)
class RouterLoad:
    """What to send where. `stream`: events, or the answer in one piece. `as_decode`: a decode leg,
    with the kv_transfer_params of a prefill leg. `events`: of a right stream, before `[DONE]`.
    `headers`: of each request, besides the usual ones."""

    url: str
    clients: int
    requests: int
    stream: bool
    as_decode: bool = False
    events: int = CHUNKS
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Batch:
    """Seconds. Per answer: to its first byte, to its end. In all: wall time and CPU."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0


def run(load: RouterLoad) -> Batch:
    """Send all and wait for the answers. Raises `RuntimeError` for a wrong answer."""
    return uvloop.run(_run(load))


async def _run(load: RouterLoad) -> Batch:
    loop, batch = asyncio.get_running_loop(), Batch()
    work = _Work(iter(range(load.requests)), _request(load), load.stream, load.events, batch)
    host, _, port = urlsplit(load.url).netloc.rpartition(":")
    async with asyncio.timeout(BATCH_S):
        clients = []
        for _ in range(load.clients):
            _, client = await loop.create_connection(
                lambda: _Client(work, loop.create_future()), host, int(port)
            )
            clients.append(client)
        began, cpu = time.perf_counter(), time.process_time()
        work.no_more_at = began + _NO_MORE_S
        for client in clients:
            client.begin()
        try:
            await asyncio.gather(*(client.done for client in clients))
        finally:
            for client in clients:
                client.close()
    batch.wall, batch.cpu = time.perf_counter() - began, time.process_time() - cpu
    return batch


def _request(load: RouterLoad) -> tuple[bytes, bytes]:
    """The bytes before and after the number that makes each prompt unique."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": f"{_NUMBER.decode()} " + "hello " * 98,
        "max_tokens": CHUNKS,
        "temperature": 0,
        "stream": load.stream,
    }
    if load.as_decode:
        body["kv_transfer_params"] = PARAMS
    data = json.dumps(body, separators=(",", ":")).encode()
    length = len(data) - len(_NUMBER) + len(_DIGITS % 0)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(load.url).netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n"
    ) + "".join(f"{name}: {value}\r\n" for name, value in load.headers.items())
    before, _, after = data.partition(_NUMBER)
    return head.encode() + b"\r\n" + before, after


@dataclass
class _Work:
    left: Iterator[int]
    request: tuple[bytes, bytes]
    stream: bool
    events: int
    batch: Batch
    no_more_at: float = math.inf


class _Client(asyncio.Protocol):
    """One connection. `done`: when there is nothing more to send, or with the error."""

    def __init__(self, work: _Work, done: asyncio.Future[None]) -> None:
        self._work, self.done = work, done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was lost in mid-answer ({error})")

    def close(self) -> None:
        """Abort the connection."""
        self._transport.abort()

    def begin(self) -> None:
        """Send the next request, if there is one left."""
        self._began = time.perf_counter()
        if self._began > self._work.no_more_at or next(self._work.left, None) is None:
            if not self.done.done():
                self.done.set_result(None)
            return
        before, after = self._work.request
        self._got: list[bytes] = []
        self._size = 0
        self._end: float | None = None  # bytes of head and body; infinite: until the last chunk
        self._transport.write(before + _DIGITS % next(_numbers) + after)

    def data_received(self, data: bytes) -> None:
        self._got.append(data)
        self._size += len(data)
        if self._end is None:
            self._end = self._head()
            if self._end is None:
                return
            self._first = time.perf_counter() - self._began
        if self._size >= self._end or (self._end == math.inf and self._is_last(data)):
            self._answered(b"".join(self._got))

    def _head(self) -> float | None:
        """Where the answer ends, once there is a byte of its body."""
        head, _, body = b"".join(self._got).partition(b"\r\n\r\n")
        if not body:
            return None
        _, found, length = head.lower().partition(b"\r\ncontent-length:")
        return len(head) + 4 + int(length.split(b"\r\n")[0]) if found else math.inf

    def _is_last(self, data: bytes) -> bool:
        if len(data) < len(_LAST_CHUNK):
            data = b"".join(self._got)
        return data.endswith(_LAST_CHUNK)

    def _answered(self, answer: bytes) -> None:
        whole = time.perf_counter() - self._began
        if self._work.stream:
            right = _events(answer, self._work.events) == self._work.events
        else:
            right = b'"total_tokens"' in answer
        if not (right and answer.startswith(b"HTTP/1.1 200")):
            self._fail(f"not the answer expected: {answer[:500]!r}")
            return
        self._work.batch.first.append(self._first)
        self._work.batch.whole.append(whole)
        self.begin()

    def _fail(self, problem: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(problem))


def _events(answer: bytes, right: int) -> int:
    """The number of events before `[DONE]`; -1 without a `[DONE]`."""
    if (count := answer.count(b"data: {")) != right:  # rarely, a chunk ends within an event
        count = _unchunked(answer).count(b"data: {")
    return count if b"data: [DONE]" in answer else -1


def _unchunked(answer: bytes) -> bytes:
    body, rest = b"", answer.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
    return body
