"""Follows the KV events of one engine (vLLM's ZmqEventPublisher) and keeps its picture.

Batches have numbers. Where one is missing, the engine is asked to send its last batches again, if
it has a replay endpoint; what cannot be had costs the picture, which later events build anew. The
same when the engine starts again: its numbers begin at 0, or its connection was lost. The picture
may be wrong for as long as that takes. It chooses engines, and must never decide anything else.

Whatever a peer sends, `run` goes on until it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from disagg.router.caches import messages
from disagg.router.caches.index import CacheIndex
from disagg.router.caches.picture import Picture

logger = logging.getLogger(__name__)

_MOST_BYTES = 8 << 20
"""Of one batch. vLLM sends one for each step: some 5 bytes a token, 9 a block."""
_MOST_WAITING = 10_000  # batches in the socket; vLLM keeps as many for a replay
_SLICE_S = 0.0005
_SWEPT = 256  # blocks in one step, about 0.1 ms
_REPLAY_S = 5.0  # for the next batch of a replay; a publisher looks for requests every 0.1 s
_RECONNECT_MS, _RECONNECT_MOST_MS = 100, 5_000
_AGAIN_S = 1.0  # after an error of the socket
_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class Counts:
    """What became of one engine's events. `gaps`: times that batches were missing. `replayed`:
    batches that were had again. `dropped`: pictures. `malformed`: batches."""

    batches: int = 0
    gaps: int = 0
    replays: int = 0
    replayed: int = 0
    dropped: int = 0
    malformed: int = 0


class Turns:
    """Lets one engine's events be applied at a time, in slices, so that a thousand engines hold
    the event loop no longer than one does."""

    def __init__(self, index: CacheIndex) -> None:
        self._index, self._lock = index, asyncio.Lock()

    async def apply(self, picture: Picture, batch: list[msgspec.Raw]) -> int:
        """Apply a batch. Returns how many events were malformed."""
        malformed = 0
        async with self._lock:
            until = time.perf_counter() + _SLICE_S
            for raw in batch:
                try:
                    event = messages.event(raw)
                except (msgspec.MsgspecError, RecursionError):
                    malformed += 1
                    continue
                for _ in picture.apply(event):
                    if time.perf_counter() > until:
                        await asyncio.sleep(0)
                        until = time.perf_counter() + _SLICE_S
                if time.perf_counter() > until:
                    await asyncio.sleep(0)
                    until = time.perf_counter() + _SLICE_S
            await self._sweep()
            # A socket with more batches never waits, so somebody else gets the loop here.
            await asyncio.sleep(0)
        return malformed

    async def drop(self, picture: Picture) -> None:
        """Drop a picture, and clear what dead pictures left."""
        async with self._lock:
            picture.drop()
            await self._sweep()

    async def _sweep(self) -> None:
        is_left = True
        while is_left:
            is_left = self._index.sweep(_SWEPT)
            if is_left:
                await asyncio.sleep(0)


@dataclass(frozen=True)
class Source:
    """Where an engine publishes. `replay`: its replay endpoint."""

    endpoint: str
    replay: str | None = None


@dataclass
class EngineEvents:
    """One engine's events. `name`: for the log."""

    name: str
    source: Source
    picture: Picture
    turns: Turns
    context: zmq.asyncio.Context
    counts: Counts = field(default_factory=Counts)
    replay_s: float = _REPLAY_S
    _applied: int | None = None
    """The number of the last batch that is in the picture; None if the picture begins anew."""
    _heard: int = -1
    """The number of the last batch of the subscription."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Follow the events until cancelled."""
        last = ""
        while True:
            try:
                await self._follow()
            except Exception as error:
                # Of the socket, or a defect of ours. It must cost this picture, and nothing else.
                if repr(error) != last:
                    logger.exception("KV events of %s", self.name)
                last = repr(error)
            await self._drop()
            await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        with self._socket(zmq.SUB) as subscription:
            subscription.setsockopt(zmq.SUBSCRIBE, b"")
            monitor = subscription.get_monitor_socket(_CONNECTED | zmq.EVENT_DISCONNECTED)
            try:
                subscription.connect(self.source.endpoint)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._watch(monitor))
                    tasks.create_task(self._listen(subscription))
            finally:
                # An error here would take the place of a cancellation, and `run` would go on.
                with contextlib.suppress(zmq.ZMQError):
                    subscription.disable_monitor()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Begin anew with every connection: behind it may be another engine."""
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            async with self._lock:
                await self._drop()
                self._heard = -1
                if event == _CONNECTED:
                    await self._catch_up()

    async def _listen(self, subscription: zmq.asyncio.Socket) -> None:
        while True:
            frames = await subscription.recv_multipart()
            async with self._lock:
                await self._hear(frames)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, _MOST_WAITING),
            (zmq.MAXMSGSIZE, _MOST_BYTES),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        return socket

    # ---- the subscription ------------------------------------------------------------------------

    async def _hear(self, frames: list[bytes]) -> None:
        number = _number(frames)
        if number is None:
            self.counts.malformed += 1
            return
        if number <= self._heard:  # it started again
            await self._drop()
            await self._catch_up()
        self._heard = number
        if self._applied is not None and number <= self._applied:
            return  # a replay had it already
        if self._applied is not None and number != self._applied + 1:
            await self._fill_gap(number)
        if self._applied is None or number > self._applied:
            await self._apply(number, frames[-1])

    async def _catch_up(self) -> None:
        """Hear what the engine published before."""
        async with aclosing(self._replay(0)) as batches:
            async for number, payload in batches:
                await self._apply(number, payload)

    async def _fill_gap(self, number: int) -> None:
        """Batches before this one are missing."""
        assert self._applied is not None
        self.counts.gaps += 1
        async with aclosing(self._replay(self._applied + 1)) as batches:
            async for replayed, payload in batches:
                if self._applied is None or replayed != self._applied + 1:
                    break
                await self._apply(replayed, payload)
        if self._applied is None or self._applied + 1 < number:
            await self._drop()

    async def _apply(self, number: int, payload: bytes) -> None:
        try:
            batch = messages.events(payload)
        except (msgspec.MsgspecError, RecursionError):
            # It may have removed blocks.
            self.counts.malformed += 1
            await self._drop()
        else:
            self.counts.batches += 1
            self.counts.malformed += await self.turns.apply(self.picture, batch)
        self._applied = number

    async def _drop(self) -> None:
        if len(self.picture) or self._applied is not None:
            self.counts.dropped += 1
        self._applied = None
        await self.turns.drop(self.picture)

    # ---- the replay ------------------------------------------------------------------------------

    async def _replay(self, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """The engine's last batches from this number on, if it has an endpoint that answers."""
        if self.source.replay is None:
            return
        self.counts.replays += 1
        with self._socket(zmq.DEALER) as socket:
            try:
                socket.connect(self.source.replay)
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                before = first - 1
                while True:
                    async with asyncio.timeout(self.replay_s):
                        frames = await socket.recv_multipart()
                    number = _number(frames)
                    if number is None or number <= before:
                        return  # the end, or nothing that goes on
                    before = number
                    self.counts.replayed += 1
                    yield number, frames[-1]
            except (TimeoutError, zmq.ZMQError):
                return


def _number(frames: list[bytes]) -> int | None:
    """The number of a batch; None of what is none, and of a replay's end.

    Frames: of a subscription topic, number, payload. Of a replay the same after an empty frame,
    without the topic from older versions.
    """
    if not 3 <= len(frames) <= 4 or len(frames[-2]) != 8 or frames[-2] == _END:
        return None
    number = int.from_bytes(frames[-2], "big", signed=True)
    return number if number >= 0 else None
