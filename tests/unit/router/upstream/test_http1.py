"""The legs' HTTP client against real sockets that also send malformed answers."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import pytest

from disagg.router.topology import EngineEndpoint
from disagg.router.upstream.http1 import Client, EngineLost, fields
from disagg.router.upstream.response import ROUND_S, UpstreamResponse

T = TypeVar("T")
Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\nx-a: 2\r\n\r\nhello"


class Engine:
    """Records its requests and connections. `speak` answers one request."""

    def __init__(self, speak: Speak) -> None:
        self._speak = speak
        self.connections = self.ended = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        # Cancelled with the test's end.
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self._speak(reader, writer)
        self.ended += 1
        writer.close()


@asynccontextmanager
async def running(speak: Speak, round_s: float) -> AsyncIterator[tuple[Engine, Client]]:
    engine, client = Engine(speak), Client(5.0, "secret", round_s=round_s)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine, client
    finally:
        client.close()
        server.close()


def says(*parts: bytes, close: bool = False) -> Speak:
    """Answers these parts, each in its own packet."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if close:
            writer.close()

    return speak


def asked(
    speak: Speak, use: Callable[[Engine, Client], Awaitable[T]], round_s: float = ROUND_S
) -> T:
    async def run() -> T:
        async with running(speak, round_s) as (engine, client), asyncio.timeout(20):
            return await use(engine, client)

    return asyncio.run(run())


async def post(
    engine: Engine, client: Client, data: bytes = b"{}", limit_s: float = 5.0
) -> UpstreamResponse:
    return await client.post(
        EngineEndpoint("decode-0", "decode", engine.url),
        "/v1/completions",
        data,
        fields([(b"x-b", "ü".encode("latin-1"))]),
        limit_s,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  what is waited for sets no event
            await asyncio.sleep(0.01)


def test_a_request_and_its_answer() -> None:
    async def use(engine: Engine, client: Client) -> None:
        answer = await post(engine, client, b'{"a": 1}')
        assert answer.status == 200
        assert answer.raw_headers == [(b"content-length", b"5"), (b"x-a", b"1"), (b"x-a", b"2")]
        assert await answer.read() == b"hello"
        assert await answer.read() == b""
        (request,) = engine.requests
        head, _, body = request.partition(b"\r\n\r\n")
        host = engine.url.removeprefix("http://").encode()
        assert head.split(b"\r\n") == [
            b"POST /v1/completions HTTP/1.1",
            b"host: " + host,
            b"content-length: 8",
            b"x-b: \xfc",
            b"authorization: Bearer secret",
        ]
        assert body == b'{"a": 1}'

    asked(says(WHOLE), use)


def test_an_engine_with_its_own_key_gets_no_other() -> None:
    async def use(engine: Engine, client: Client) -> None:
        own = EngineEndpoint("decode-0", "decode", engine.url, "Basic own")
        await (await client.post(own, "/v1/completions", b"{}", b"", 5.0)).read()
        await (await post(engine, client)).read()
        found = [re.findall(rb"authorization: (.*)\r", request) for request in engine.requests]
        assert found == [[b"Basic own"], [b"Bearer secret"]]

    asked(says(WHOLE), use)


@pytest.mark.parametrize(
    ("parts", "body"),
    [
        ([WHOLE], b"hello"),
        ([WHOLE[i : i + 1] for i in range(len(WHOLE))], b"hello"),
        (
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n"],
            b"abc",
        ),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE], b"hello"),
        ([b"HTTP/1.1 103 Hints\r\nLink: a\r\n\r\n" + WHOLE], b"hello"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        ([b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno"], b"no"),
    ],
)
def test_kept_connections(parts: list[bytes], body: bytes) -> None:
    async def use(engine: Engine, client: Client) -> None:
        for _ in range(3):
            answer = await post(engine, client)
            assert await answer.read() == body
            answer.close()  # has no effect
            await asyncio.sleep(0.05)
        assert engine.connections == 1

    asked(says(*parts), use)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _each(letters: bytes) -> list[bytes]:
    return [b"1\r\n%c\r\n" % letter for letter in letters]


@pytest.mark.parametrize(
    ("round_s", "parts", "reads"),
    [
        # The first two chunks are passed on at once. The end does not wait for a round.
        (60.0, [*_each(b"abcd"), b"0\r\n\r\n"], [b"a", b"b", b"cd"]),
        (60.0, [b"1\r\na\r\n0\r\n\r\n"], [b"a"]),
        # Neither does more than the buffer may hold.
        (60.0, [*_each(b"ab"), b"40000\r\n" + b"b" * 0x40000, b"\r\n0\r\n\r\n"], None),
        # A chunk that arrives slowly does not wait, nor any chunk without rounds.
        (0.0, [*_each(b"abcd"), b"0\r\n\r\n"], [b"a", b"b", b"c", b"d"]),
        (0.001, [*_each(b"abcd"), b"0\r\n\r\n"], [b"a", b"b", b"c", b"d"]),
        (1.0, _each(b"abcd"), [b"a", b"b", b"cd"]),
    ],
)
def test_a_burst_is_read_in_few_pieces(
    round_s: float, parts: list[bytes], reads: list[bytes] | None
) -> None:
    async def use(engine: Engine, client: Client) -> None:
        answer = await post(engine, client)
        got = [await answer.readany()]
        while len(got) < len(reads or ()) or (reads is None and got[-1]):
            got.append(await answer.readany())
        if reads is None:
            assert b"".join(got) == b"a" + b"b" * 0x40001
        else:
            assert got == reads
        answer.close()

    asked(says(CHUNKED, *parts), use, round_s)


def test_bytes_before_an_error_are_read() -> None:
    async def use(engine: Engine, client: Client) -> None:
        answer = await post(engine, client)
        assert [await answer.readany() for _ in range(3)] == [b"a", b"b", b"c"]
        with pytest.raises(EngineLost):
            await answer.readany()

    asked(says(CHUNKED, *_each(b"abc"), close=True), use, 60.0)


@pytest.mark.parametrize(
    "parts",
    [
        [WHOLE + b"more"],
        [WHOLE + WHOLE],
        [WHOLE, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"],
        [WHOLE.replace(b"X-A: 1", b"Connection: close")],
        [b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
    ],
)
def test_connections_that_are_not_reused(parts: list[bytes]) -> None:
    async def use(engine: Engine, client: Client) -> None:
        for _ in range(3):
            assert await (await post(engine, client)).read() == b"hello"
            await asyncio.sleep(0.05)
        assert engine.connections == 3
        await until(lambda: engine.ended == 3)

    asked(says(*parts), use)


def test_a_connection_that_is_closed_is_not_used_again() -> None:
    """Although asyncio has not said yet that it is lost."""

    async def use(engine: Engine, client: Client) -> None:
        assert await (await post(engine, client)).read() == b"hello"
        await until(lambda: bool(client._idle[engine.url]))
        (connection,) = client._idle[engine.url]
        connection.data_received(b"more")  # as asyncio calls it
        assert await (await post(engine, client)).read() == b"hello"
        assert engine.connections == 2

    asked(says(WHOLE), use)


def test_a_connection_is_read_on_although_its_last_answer_is_not() -> None:
    """The buffer is full with the answer's last byte. Nobody reads it, and reading has paused."""
    size = (128 << 10) + 1

    async def use(engine: Engine, client: Client) -> None:
        answers = []
        for _ in range(2):
            answers.append(await post(engine, client))
            await until(lambda: bool(client._idle[engine.url]))
        assert engine.connections == 1
        assert [len(await answer.read()) for answer in answers] == [size, size]

    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    asked(says(head + bytes(size)), use)


def test_concurrent_requests_have_a_connection_each() -> None:
    async def use(engine: Engine, client: Client) -> None:
        answers = await asyncio.gather(*(post(engine, client) for _ in range(20)))
        assert [await answer.read() for answer in answers] == [b"hello"] * 20
        assert engine.connections == 20
        await asyncio.sleep(0.05)
        await asyncio.gather(*(post(engine, client) for _ in range(20)))
        assert engine.connections == 20

    asked(says(WHOLE), use)


def test_an_answer_that_ends_with_its_connection() -> None:
    async def use(engine: Engine, client: Client) -> None:
        assert await (await post(engine, client)).read() == b"abcdef"

    asked(says(b"HTTP/1.1 200 OK\r\n\r\nabc", b"def", close=True), use)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"HTTP/1.1 200"],
        [b"\x00\x01\x02 garbage\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n", *[b"x-a: " + b"a" * 60_000 + b"\r\n"] * 3],
        [b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"],
    ],
)
def test_no_answer(parts: list[bytes]) -> None:
    async def use(engine: Engine, client: Client) -> None:
        with pytest.raises(EngineLost):
            await post(engine, client)
        await until(lambda: engine.ended == 1)

    asked(says(*parts, close=True), use)


def _never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
    async def speak() -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        with suppress(ConnectionError):
            for number in range(10_000):
                writer.write(b"x-%d: " % number + b"a" * 1000 + b"\r\n")
                await writer.drain()

    return speak()


def test_a_head_without_an_end_is_not_kept() -> None:
    """Although the connection stays open, and before the time is over."""

    async def use(engine: Engine, client: Client) -> None:
        with pytest.raises(EngineLost, match="more than 65536 bytes"):
            await post(engine, client)
        await until(lambda: engine.ended == 1)

    asked(_never_ends, use)


def test_a_long_body_is_no_long_head() -> None:
    async def use(engine: Engine, client: Client) -> None:
        for _ in range(2):
            answer = await post(engine, client)
            assert len(await answer.read()) == 100_000
            await until(lambda: bool(client._idle[engine.url]))
        assert engine.connections == 1

    body = b"a" * 100_000
    asked(says(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", body), use)


def test_a_silent_host_is_noticed_on_every_connection() -> None:
    """By the kernel: see `keepalive.py`."""

    async def use(engine: Engine, client: Client) -> None:
        await (await post(engine, client)).read()
        await until(lambda: bool(client._idle[engine.url]))
        (connection,) = client._idle[engine.url]
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000

    asked(says(WHOLE), use)


@pytest.mark.parametrize(
    "head",
    [b"Content-Length: 9", b"Transfer-Encoding: chunked"],
)
def test_bytes_before_the_loss_are_read(head: bytes) -> None:
    body = b"3\r\nabc\r\n" if b"chunked" in head else b"abc"

    async def use(engine: Engine, client: Client) -> None:
        answer = await post(engine, client)
        await until(lambda: engine.ended == 1)
        assert await answer.readany() == b"abc"
        for _ in range(2):
            with pytest.raises(EngineLost):
                await answer.readany()

    asked(says(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body, close=True), use)


def test_a_broken_chunk_is_a_loss() -> None:
    async def use(engine: Engine, client: Client) -> None:
        answer = await post(engine, client)
        with pytest.raises(EngineLost, match="HTTP"):
            await answer.read()

    asked(says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\nabc\r\n"), use)


def test_no_server() -> None:
    async def use(engine: Engine, client: Client) -> None:
        nobody = EngineEndpoint("decode-0", "decode", "http://127.0.0.1:1")
        with pytest.raises(EngineLost, match="no connection"):
            await client.post(nobody, "/", b"", b"", 5.0)

    asked(says(WHOLE), use)


def test_silence_before_the_head() -> None:
    """It closes the connection. After a head in time, the body has no time limit here."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def use(engine: Engine, client: Client) -> None:
        with pytest.raises(TimeoutError):
            await post(engine, client, limit_s=0.1)
        await until(lambda: engine.ended == 1)

    asked(silent, use)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE[:-5])
        await asyncio.sleep(0.5)
        writer.write(WHOLE[-5:])

    async def wait(engine: Engine, client: Client) -> None:
        answer = await post(engine, client, limit_s=0.2)
        assert await answer.read() == b"hello"
        await asyncio.sleep(0.01)
        assert await (await post(engine, client, limit_s=0.2)).read() == b"hello"
        assert engine.connections == 1

    asked(slow, wait)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_reader_that_leaves_closes_the_connection(how: str) -> None:
    errors = []

    async def use(engine: Engine, client: Client) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        if how == "close":
            (await post(engine, client)).close()
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await post(engine, client)
        await until(lambda: engine.ended == 1)
        assert errors == []

    head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" if how == "close" else b"HTTP/1.1"

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        assert not await reader.read(1)

    asked(speak, use)


def test_an_unread_answer_makes_the_engine_wait() -> None:
    total, sent = 64 << 20, 0

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async def use(engine: Engine, client: Client) -> None:
        answer = await post(engine, client)
        await asyncio.sleep(0.3)
        assert sent < total // 2
        got = 0
        while piece := await answer.readany():
            got += len(piece)
        assert got == total

    asked(speak, use)


def test_a_set_error_is_raised_after_the_data() -> None:
    async def use(engine: Engine, client: Client) -> None:
        answer = await post(engine, client)
        waiting = asyncio.create_task(answer.read())
        await asyncio.sleep(0.05)
        answer.set_exception(TimeoutError())
        with pytest.raises(TimeoutError):
            await waiting
        answer.close()

    asked(says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"), use)


@pytest.mark.parametrize("value", [b"b\r\nx-c: d", b"b\nx-c: d", b"b\rd"])
def test_a_header_with_a_line_break_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="line break"):
        fields([(b"x-a", value)])
