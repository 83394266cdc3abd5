"""The two ends of disagg's transports in `bench transfer`: control server, leases and fetches.

Both live in child processes of the benchmark. The clock runs for `transport.fetch.fetched`, from
its call until all blocks are there and verified. If the producer is asked, that includes acquire,
fetch and release over the control channel. The lease is granted before the clock starts. The
consumer also measures one thread's memcpy of the same bytes into the same memory. `device.py` has
the ends on a device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from disagg.bench.transfer.memory import BenchMemory, Ints, offsets, pieces
from disagg.checksums import Checksum, ChecksumName
from disagg.errors import DisaggError
from disagg.private_files import PrivateFolder
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob, Receiver, Sender
from disagg.transport.blocks import BlockCache
from disagg.transport.control.client import Endpoint, Peers
from disagg.transport.control.lease import LeaseTable
from disagg.transport.control.server import ControlServer
from disagg.transport.deadline import Deadline
from disagg.transport.device.staging import Staging, open_staging
from disagg.transport.fetch import FetchRequest, Moved, fetched
from disagg.transport.names import TransportName
from disagg.transport.one_sided.lease_board import LeaseBoard
from disagg.transport.registry import Means, make_receiver, make_sender
from disagg.transport.shared_storage import Storage

FETCH_S = 30.0
_HOST, _SECRET = "127.0.0.1", b"of this bench"

# Block ids of each concurrent fetch.
IdLists = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Setup:
    """One end: its memory, the folder for files, and its staging memory on a device."""

    num_bytes: int
    layers: int
    device: str
    folder: Path
    staging_bytes: int
    checksum: ChecksumName = "keyed"


class End:
    """A cache of blocks, of one block size after the other, and its transports."""

    sends = receives = False

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)
        self.setup = setup
        self.memory = self.make_memory()
        self.block_bytes = 0
        self.staging: Staging | None = None

    def make_memory(self) -> BenchMemory:
        """The memory of this end."""
        if self.setup.device != "cpu":
            torch.cuda.set_device(self.setup.device)
        return BenchMemory(self.setup.num_bytes, self.setup.device, self.setup.layers)

    def make_staging(self, cache: BlockCache) -> Staging | None:
        """Staging memory; None for a cache in host memory."""
        size = self.setup.staging_bytes
        return open_staging(cache, size, sends=self.sends, receives=self.receives)

    def make_means(self, cache: BlockCache, board: LeaseBoard | None = None) -> Means:
        """The means of this cache's transports; files go to the folder."""
        self.staging = self.make_staging(cache)
        checksum = Checksum.named(self.setup.checksum, b"files of this bench", _SECRET)
        folder = PrivateFolder(self.setup.folder)
        storage = Storage(folder, max_bytes=64 << 30, checksum=checksum)
        return Means(_HOST, _SECRET, storage, self.staging, board)

    def ready(self) -> None:
        """Returns once this end is made."""

    def num_bytes(self, ids: IdLists) -> int:
        """Bytes of all these blocks."""
        return sum(map(len, ids)) * self.block_bytes * self.setup.layers

    def offsets(self, ids: IdLists) -> Ints:
        """Offsets of these blocks in the memory, layer by layer."""
        every, layer = sum(map(list, ids), list[int]()), self.memory.flat.shape[1]
        return offsets(every, self.block_bytes, layer, self.setup.layers)

    def close(self) -> None:
        """Free the staging memory; no transport may use it any more."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None

    def leave(self) -> None:
        """Close everything; no call follows."""
        self.close()


class Producer(End):
    """The source of all fetches. One control server per block size, in turn."""

    sends = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.memory.fill()
        self._lives = 0
        self._server: ControlServer | None = None
        self._senders: list[Sender] = []

    def serve(self, ways: Sequence[str], block_bytes: int) -> tuple[Endpoint, dict[str, str]]:
        """Listen for fetches of blocks of this size. Also returns why ways do not work here."""
        self.close()
        self.block_bytes = block_bytes
        cache, missing = self.memory.cache(block_bytes), dict[str, str]()
        self._leases = LeaseTable(FETCH_S)
        means = self.make_means(cache, self._leases.board)
        for way in ways:
            try:
                self._senders.append(make_sender(cast("TransportName", way), cache, means))
            except (ImportError, DisaggError, OSError) as error:
                missing[way] = f"{type(error).__name__}: {error}"
        self._lives += 1
        generation = f"life-{self._lives}"
        offers = {sender.name: sender.offer() for sender in self._senders}
        self._server = ControlServer(
            host=_HOST,
            port=0,
            secret=_SECRET,
            hello=p.Welcome("bench-producer", generation, offers, _layers(cache)),
            fingerprint=_fingerprint(block_bytes),
            cache=cache,
            leases=self._leases,
            senders=self._senders,
            use_limit_s=FETCH_S,
        )
        return Endpoint(_HOST, self._server.port, generation), missing

    def grant(self, first: int, ids: IdLists) -> None:
        """One lease for each list of block ids, numbered from `first` on."""
        self._leases.take_ended()
        for number, block_ids in enumerate(ids):
            self._leases.grant(first + number, f"request-{first + number}", block_ids, FETCH_S)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        for sender in self._senders:
            sender.close()
        self._server, self._senders = None, []
        super().close()


class Consumer(End):
    """Fetches into its own memory, and checks the bytes."""

    receives = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._source = self.make_source()
        self._threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="bench-load")
        self._peers: Peers | None = None
        self._receivers: dict[str, Receiver] = {}

    def make_source(self) -> BenchMemory | None:
        """A copy of the producer's memory, for memcpy within this process."""
        source = self.make_memory()
        source.fill()
        return source

    def connect(self, ways: Sequence[str], block_bytes: int, endpoint: Endpoint) -> dict[str, str]:
        """Use this producer from now on. Returns why ways do not work here."""
        self.close()
        self.block_bytes, self._endpoint = block_bytes, endpoint
        self._cache = self.memory.cache(block_bytes)
        self._peers = Peers("bench-consumer", _fingerprint(block_bytes), _SECRET)
        means, missing = self.make_means(self._cache), dict[str, str]()
        for way in ways:
            try:
                name = cast("TransportName", way)
                self._receivers[way] = make_receiver(name, self._cache, means)
            except (ImportError, DisaggError, OSError) as error:
                missing[way] = f"{type(error).__name__}: {error}"
        return missing

    def close(self) -> None:
        """Disconnect from the producer."""
        for receiver in self._receivers.values():
            receiver.close()
        if self._peers is not None:
            self._peers.close()
        self._peers, self._receivers = None, {}
        super().close()

    def fetch(self, way: str, first: int, here: IdLists) -> float:
        """Seconds until all leases from `first` on are fetched, each by its own thread."""
        if way not in self._receivers:
            raise DisaggError(f"{way} is not open")
        began = time.perf_counter()
        if len(here) == 1:
            loaded = [self._load(way, first, here[0])]
        else:
            futures: list[Future[tuple[Moved, float]]] = [
                self._threads.submit(self._load, way, first + number, ids)
                for number, ids in enumerate(here)
            ]
            loaded = [future.result(FETCH_S + 5) for future in futures]
        seconds = max(there_at for _, there_at in loaded) - began
        if any(moved.transport != way for moved, _ in loaded):
            raise DisaggError(f"another transport than {way} moved the bytes")
        return seconds

    def memcpy(self, kind: str, here: IdLists, there: IdLists) -> float:
        """Seconds for one thread to copy the same bytes: "flat" or in the same "pieces"."""
        assert self._source is not None
        if kind == "flat":
            count = self.num_bytes(here)
            to, source = self.memory.flat.view(-1).numpy(), self._source.flat.view(-1).numpy()
            began = time.perf_counter()
            np.copyto(to[:count], source[:count])
            return time.perf_counter() - began
        to_pieces = pieces(self.memory, self.offsets(here), self.block_bytes)
        from_pieces = pieces(self._source, self.offsets(there), self.block_bytes)
        began = time.perf_counter()
        for to, source in zip(to_pieces, from_pieces, strict=True):
            np.copyto(to, source)
        return time.perf_counter() - began

    def wipe(self) -> None:
        """Zero the memory."""
        self.memory.wipe()

    def wrong_blocks(self, here: IdLists, there: IdLists) -> int:
        """How many blocks differ from the source's."""
        size = self.block_bytes
        return sum(self.memory.wrong_blocks(size, *pair) for pair in zip(here, there, strict=True))

    def wrong_pages(self, here: IdLists) -> int:
        """How many pages differ, for ways that move as many bytes in one piece."""
        return self.memory.wrong_pages(self.num_bytes(here))

    def _load(self, way: str, lease: int, ids: Sequence[int]) -> tuple[Moved, float]:
        """Also returns the time at which the blocks were there."""
        assert self._peers is not None
        blocks = self._cache.whole(ids)
        part = p.Part(blocks.unit, ((0, blocks.count),))
        job = FetchJob(blocks, Deadline.after(FETCH_S))
        wanted = FetchRequest(self._endpoint, lease, part, _layers(self._cache))
        with fetched(self._peers, wanted, job, [self._receivers[way]]) as moved:
            return moved, time.perf_counter()


def _layers(cache: BlockCache) -> tuple[str, ...]:
    return tuple(region.name for region in cache.regions)


def _fingerprint(block_bytes: int) -> dict[str, str]:
    return {"model": "bench", "block_bytes": str(block_bytes)}
