"""A picture that follows vLLM's own publisher: gaps, replays, restarts, and bytes that are none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from unit.router.caches.publisher import IDS, SIZE, Publisher, kv_events, publishing

from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.caches.engine_caches import EngineCaches, Held
from disagg.router.caches.events import EngineEvents, Source, Turns


class Follower:
    """What a router knows of one engine."""

    def __init__(self, source: Source, context: zmq.asyncio.Context) -> None:
        self.caches = EngineCaches()
        turns = Turns(self.caches.index)
        picture = self.caches.join("e")
        self.events = EngineEvents("e", source, picture, turns, context, replay_s=1.0)

    @property
    def blocks(self) -> int:
        return self.caches.held(PromptBlocks(IDS), "m", "e").on_gpu // SIZE


@asynccontextmanager
async def following(publisher: Publisher) -> AsyncIterator[Follower]:
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    follower = Follower(publisher.source, context)
    task = asyncio.create_task(follower.events.run())
    try:
        yield follower
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        context.destroy(linger=0)


async def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.01)


async def connected(publisher: Publisher, follower: Follower) -> None:
    """Without a replay endpoint, what is published before is not heard."""
    deadline = time.monotonic() + 20
    while not follower.events.counts.batches:
        assert time.monotonic() < deadline
        publisher.tell()
        await asyncio.sleep(0.05)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await test()

    asyncio.run(whole())


def test_what_was_published_before_is_heard() -> None:
    async def test() -> None:
        with publishing() as publisher:
            publisher.store(*range(10))
            publisher.settle()
            async with following(publisher) as follower:
                await until(lambda: follower.blocks == 10)
                publisher.store(*range(10, 20))
                publisher.remove(19)
                await until(lambda: follower.blocks == 19 and follower.events.picture.removed == 1)
                publisher.tell(kv_events.AllBlocksCleared())
                await until(lambda: follower.blocks == 0)
                publisher.store(0)
                await until(lambda: follower.blocks == 1)
                counts = follower.events.counts
                assert (counts.gaps, counts.dropped, counts.malformed) == (0, 0, 0)

    run(test)


def test_a_gap_is_filled_by_a_replay() -> None:
    """The subscription loses batches; the publisher still has them."""

    async def test() -> None:
        with publishing() as publisher:
            async with following(publisher) as follower:
                publisher.store(0)
                await until(lambda: follower.blocks == 1)
                real = publisher.real._pub

                class Deaf:
                    def send_multipart(self, frames: object) -> None:
                        pass

                publisher.settle()
                publisher.real._pub = Deaf()
                publisher.store(1, 2, 3)
                publisher.settle()
                publisher.real._pub = real
                publisher.store(4, 5)
                await until(lambda: follower.blocks == 6)
                counts = follower.events.counts
                assert (counts.gaps, counts.dropped) == (1, 0)
                assert counts.replays == 2, "one more at the start"

    run(test)


@pytest.mark.parametrize("replays", [True, False])
def test_what_is_lost_for_good_costs_the_picture(replays: bool) -> None:
    async def test() -> None:
        with publishing(replays=replays) as publisher:
            async with following(publisher) as follower:
                await connected(publisher, follower)
                publisher.store(0, 1, 2)
                await until(lambda: follower.blocks == 3)
                publisher.lose()
                publisher.store(3)
                await until(lambda: follower.events.counts.dropped == 1)
                assert follower.blocks == 0
                await until(lambda: follower.events.picture.ignored["unknown_parent"] == 1)
                publisher.store(0, 1)
                await until(lambda: follower.blocks == 2)
                assert follower.events.counts.gaps == 1

    run(test)


@pytest.mark.parametrize("replays", [True, False])
def test_an_engine_that_starts_again_holds_nothing(replays: bool) -> None:
    async def test() -> None:
        with publishing(replays=replays) as publisher:
            async with following(publisher) as follower:
                await connected(publisher, follower)
                publisher.store(0, 1, 2)
                await until(lambda: follower.blocks == 3)
                publisher.stop()
                await until(lambda: follower.blocks == 0)
                publisher.start()
                deadline = time.monotonic() + 20
                while follower.blocks != 1 and time.monotonic() < deadline:
                    publisher.store(0)  # again and again: a new connection takes its time
                    await asyncio.sleep(0.1)
                assert follower.blocks == 1
                assert len(follower.events.picture) == 1

    run(test)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 100,
        b"\x93\x01\x02\x03",
        b"\x91" * 100_000,  # arrays in arrays
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",  # an array that claims to be long
    ],
)
def test_bytes_that_are_no_batch_cost_the_picture(payload: bytes) -> None:
    """It may have removed blocks."""

    async def test() -> None:
        with publishing() as publisher:
            async with following(publisher) as follower:
                publisher.store(0)
                await until(lambda: follower.blocks == 1)
                publisher.raw(payload)
                await until(lambda: follower.events.counts.malformed == 1)
                assert follower.blocks == 0
                publisher.store(0, 1)
                await until(lambda: follower.blocks == 2)
                assert follower.events.counts.dropped == 1

    run(test)


@pytest.mark.parametrize("turns", range(1, 13))
def test_a_cancellation_amid_a_replay_ends_it(tmp_path: Path, turns: int) -> None:
    """Whatever else that turn of the event loop brings, such as the next batch."""
    source = Source(f"ipc://{tmp_path}/events", at := f"ipc://{tmp_path}/replay")

    async def send(replay: zmq.asyncio.Socket) -> None:
        """Batches without an end: one or more wait at any time."""
        who = (await replay.recv_multipart())[0]
        for number in range(1_000_000):
            frames = [who, b"", number.to_bytes(8, "big"), b"\x92\x00\x90"]
            await replay.send_multipart(frames)
            await asyncio.sleep(0)

    async def test() -> None:
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        events, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        events.bind(source.endpoint)
        replay.bind(at)
        sending = asyncio.create_task(send(replay))
        follower = Follower(source, context)
        task = asyncio.create_task(follower.events.run())
        try:
            await until(lambda: follower.events.counts.batches > 10)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            assert await asyncio.wait({task}, timeout=10) == ({task}, set())
        finally:
            sending.cancel()
            context.destroy(linger=0)

    run(test)


def test_an_event_of_another_kind_is_left_out() -> None:
    async def test() -> None:
        with publishing() as publisher:
            async with following(publisher) as follower:
                publisher.tell({"type": "BlockMoved"}, {"type": "AllBlocksCleared", "why": 1}, 7)
                publisher.store(0)
                await until(lambda: follower.blocks == 1)
                assert follower.events.counts.malformed == 2

    run(test)


def test_frames_that_are_no_batch_are_counted() -> None:
    async def test() -> None:
        with publishing() as publisher:
            async with following(publisher) as follower:
                publisher.store(0)
                await until(lambda: follower.blocks == 1)
                publisher.settle()
                for frames in ([b""], [b"", b"1", b""], [b""] * 9, [b"", b"\xff" * 8, b""]):
                    publisher.real._pub.send_multipart(frames)
                await until(lambda: follower.events.counts.malformed == 4)
                publisher.store(1)
                await until(lambda: follower.blocks == 2)

    run(test)


def test_a_replay_endpoint_that_says_nothing_is_left() -> None:
    async def test() -> None:
        with publishing(replays=False) as publisher, socket_that_is_silent() as silent:
            publisher.store(0)
            source = publisher.source
            context: zmq.asyncio.Context = zmq.asyncio.Context()
            follower = Follower(Source(source.endpoint, silent), context)
            task = asyncio.create_task(follower.events.run())
            await connected(publisher, follower)
            publisher.store(0)
            await until(lambda: follower.blocks == 1)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            context.destroy(linger=0)

    run(test)


@contextmanager
def socket_that_is_silent() -> Iterator[str]:
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        context.destroy(linger=0)


def test_nothing_is_held_without_events() -> None:
    caches = EngineCaches()
    assert caches.held(PromptBlocks(IDS), "m", "e") == Held()


def test_an_address_that_is_none_costs_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        follower = Follower(Source("tcp://nothing"), context)
        task = asyncio.create_task(follower.events.run())
        await until(lambda: bool(caplog.records))
        assert not task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        context.destroy(linger=0)

    run(test)
    assert "KV events of e" in caplog.text


def test_numbers_that_begin_anew_on_one_connection() -> None:
    async def test() -> None:
        with publishing(replays=False) as publisher:
            async with following(publisher) as follower:
                await connected(publisher, follower)
                publisher.store(0, 1, 2)
                await until(lambda: follower.blocks == 3)
                publisher.settle()
                publisher.real._seq_gen = iter(range(1000))
                publisher.store(0)
                await until(lambda: follower.blocks == 1)
                publisher.lose()
                publisher.store(0, 1)
                await until(lambda: follower.blocks == 2)
                assert follower.events.counts.dropped == 2

    run(test)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_publishes_in_a_folder(tmp_path: Path, rank: int) -> None:
    """As `disagg serve` starts engines on one machine, data parallel ranks too."""

    async def test() -> None:
        given = [f"ipc://{tmp_path}/inproc-{name}" for name in ("endpoint", "replay_endpoint")]
        real = kv_events.ZmqEventPublisher(rank, *given)
        config = real.get_publisher_config()
        context: zmq.asyncio.Context = zmq.asyncio.Context()
        follower = Follower(Source(config.endpoint, config.replay_endpoint), context)
        more = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        stored = kv_events.BlockStored([1], None, IDS[:SIZE], SIZE, None, "GPU", None, **more)
        real.publish(kv_events.KVEventBatch(ts=1.0, events=[stored]))
        task = asyncio.create_task(follower.events.run())
        try:
            await until(lambda: follower.blocks == 1)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            context.destroy(linger=0)
            real.shutdown()

    run(test)
