"""The two ends of our transports for `bench transfer`: real control server, leases and fetches.

Both live in child processes of the benchmark. A fetch is `handoff.fetch`: acquire, fetch and
release over the control channel; the lease is granted before the clock starts. One thread's
memcpy of the same bytes is measured in the consumer, into the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import torch

from disagg.bench.transfer_memory import Memory, offsets, pieces
from disagg.errors import DisaggError
from disagg.transport import protocol as p
from disagg.transport.base import Deadline, FetchJob, Receiver, Sender
from disagg.transport.client import Endpoint, Peers
from disagg.transport.handoff import Moved, Wanted, fetch
from disagg.transport.lease import LeaseTable
from disagg.transport.names import TransportName
from disagg.transport.registry import Means, make_receiver, make_sender
from disagg.transport.server import ControlServer
from disagg.transport.shared_storage import Storage

FETCH_S = 30.0
_HOST, _SECRET = "127.0.0.1", b"of this bench"

# Block ids of each concurrent fetch.
IdLists = Sequence[Sequence[int]]


def means(folder: Path) -> Means:
    """What the transports need; files go to `folder`."""
    return Means(_HOST, _SECRET, Storage(folder, max_bytes=64 << 30))


class Producer:
    """The source of all fetches. One control server per block size, in turn."""

    def __init__(self, num_bytes: int, device: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self._memory, self._means = Memory(num_bytes, device), means(folder)
        self._memory.fill()
        self._lives = 0
        self._server: ControlServer | None = None
        self._senders: list[Sender] = []

    def serve(self, ways: Sequence[str], block_bytes: int) -> tuple[Endpoint, dict[str, str]]:
        """Listen for fetches of such blocks; also says which ways this end cannot do, and why."""
        self.close()
        cache, missing = self._memory.cache(block_bytes), dict[str, str]()
        for way in ways:
            try:
                self._senders.append(make_sender(cast("TransportName", way), cache, self._means))
            except (ImportError, DisaggError, OSError) as error:
                missing[way] = f"{type(error).__name__}: {error}"
        self._lives += 1
        generation = f"life-{self._lives}"
        self._leases = LeaseTable()
        offers = {sender.name: sender.offer() for sender in self._senders}
        self._server = ControlServer(
            host=_HOST,
            port=0,
            secret=_SECRET,
            hello=p.Welcome("bench-producer", generation, offers),
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


class Consumer:
    """Fetches into its own memory, and knows what must be there afterwards."""

    def __init__(self, num_bytes: int, device: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self.memory, self._means = Memory(num_bytes, device), means(folder)
        self._source = Memory(num_bytes, device)
        self._source.fill()
        self._threads = ThreadPoolExecutor(max_workers=64, thread_name_prefix="bench-load")
        self._peers: Peers | None = None

    def connect(self, ways: Sequence[str], block_bytes: int, endpoint: Endpoint) -> dict[str, str]:
        """Use this producer from now on; says which ways this end cannot do, and why."""
        if self._peers is not None:
            self._peers.close()
        self._block_bytes, self._endpoint = block_bytes, endpoint
        self._cache = self.memory.cache(block_bytes)
        self._peers = Peers("bench-consumer", _fingerprint(block_bytes), _SECRET)
        self._receivers, missing = dict[str, Receiver](), dict[str, str]()
        for way in ways:
            try:
                name = cast("TransportName", way)
                self._receivers[way] = make_receiver(name, self._cache, self._means)
            except (ImportError, DisaggError, OSError) as error:
                missing[way] = f"{type(error).__name__}: {error}"
        return missing

    def fetch(self, way: str, first: int, here: IdLists) -> float:
        """Seconds until all leases from `first` on were fetched, each by its own thread."""
        if way not in self._receivers:
            raise DisaggError(f"{way} is not open")
        began = time.perf_counter()
        if len(here) == 1:
            moved = [self._load(way, first, here[0])]
        else:
            futures: list[Future[Moved]] = [
                self._threads.submit(self._load, way, first + number, ids)
                for number, ids in enumerate(here)
            ]
            moved = [future.result(FETCH_S + 5) for future in futures]
        seconds = time.perf_counter() - began
        if any(done.transport != way for done in moved):
            raise DisaggError(f"{way} was not what moved the bytes")
        return seconds

    def memcpy(self, kind: str, here: IdLists, there: IdLists) -> float:
        """Seconds for one thread to copy the same bytes: "flat" or in the same "pieces"."""
        size, layer = self._block_bytes, self.memory.flat.shape[1]
        ours, theirs = sum(map(list, here), list[int]()), sum(map(list, there), list[int]())
        count = len(ours) * size * len(self.memory.flat)
        if self.memory.flat.is_cuda:
            return self._memcpy_on_device(kind, ours, theirs)
        if kind == "flat":
            to, source = self.memory.flat.view(-1).numpy(), self._source.flat.view(-1).numpy()
            began = time.perf_counter()
            np.copyto(to[:count], source[:count])
            return time.perf_counter() - began
        to_pieces = pieces(self.memory, offsets(ours, size, layer), size)
        from_pieces = pieces(self._source, offsets(theirs, size, layer), size)
        began = time.perf_counter()
        for to, source in zip(to_pieces, from_pieces, strict=True):
            np.copyto(to, source)
        return time.perf_counter() - began

    def _memcpy_on_device(self, kind: str, ours: list[int], theirs: list[int]) -> float:
        # Layers are whole blocks of every size that is measured.
        shape = (len(self.memory.flat), -1, self._block_bytes)
        to, source = (memory.flat.view(shape) for memory in (self.memory, self._source))
        at = [torch.tensor(ids, device=to.device) for ids in (ours, theirs)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        if kind == "flat":
            to[:, : len(ours)].copy_(source[:, : len(ours)])
        else:
            to[:, at[0]] = source[:, at[1]]
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def wipe(self) -> None:
        """Forget what was moved so far."""
        self.memory.wipe()

    def wrong_blocks(self, here: IdLists, there: IdLists) -> int:
        """How many blocks hold something else than the source's."""
        size = self._block_bytes
        return sum(self.memory.wrong_blocks(size, *pair) for pair in zip(here, there, strict=True))

    def _load(self, way: str, lease: int, ids: Sequence[int]) -> Moved:
        assert self._peers is not None
        blocks = self._cache.whole(ids)
        part = p.Part(blocks.unit, ((0, blocks.count),))
        job = FetchJob(blocks, Deadline.after(FETCH_S))
        wanted = Wanted(self._endpoint, lease, part)
        return fetch(self._peers, wanted, job, [self._receivers[way]])


def _fingerprint(block_bytes: int) -> dict[str, str]:
    return {"model": "bench", "block_bytes": str(block_bytes)}
