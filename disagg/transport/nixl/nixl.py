"""NIXL: the consumer's agent reads blocks out of the memory that the producer's agent registered.

For networks that NIXL's plugins know (InfiniBand, RoCE, EFA), between host memories or GPUs. One-
sided, like process memory: the producer only names blocks, and the consumer reads them while the
lease is in use. On one host it reads the lease from the producer's board, as process memory does.
Else it asks, and nothing here proves that the blocks were still the lease's; `Release` does (see
`base.py`). The agents' metadata travels in the offer, so only peers with the secret get it.

The consumer reads a token in the producer's memory before it believes an offer. It does not open
one whose blocks would go through UCX's TCP, or through its shared memory without the kernel's copy
between processes: there the producer takes part, and UCX 1.23 ends its process when a consumer dies
or gives up in mid-fetch. `tcp` serves these. `NixlSettings.tcp` allows it all the same.

Nobody prepares descriptors of all blocks: that takes 40 bytes for each block and layer of every
producer, and saves less than a hundredth of a fetch. Within one host the threads of the consumer
copy, so several share a large fetch.
"""

from __future__ import annotations

import logging
import secrets
import weakref

import msgspec
import numpy as np

from disagg.errors import DataCorrupt, TransferError
from disagg.transport.base import FetchJob
from disagg.transport.blocks import BlockCache, Ints, Selection
from disagg.transport.deadline import Deadline
from disagg.transport.device.base import Wait
from disagg.transport.host.helper_threads import HelperThreads
from disagg.transport.host.process_vm import peek
from disagg.transport.host.ptrace_scope import AllowedReaders
from disagg.transport.nixl import library
from disagg.transport.nixl.agent import Agent, Span
from disagg.transport.nixl.library import NAME
from disagg.transport.nixl.link import Link
from disagg.transport.nixl.reads import Side, reads
from disagg.transport.nixl.settings import NixlSettings
from disagg.transport.one_sided import offers
from disagg.transport.one_sided.lease_board import LeaseBoard
from disagg.transport.one_sided.remote_lease_board import (
    BoardCache,
    LeaseBoardOffer,
    board_offer,
    open_board,
)

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_TOKEN_S = 5.0
_MOST_METADATA = 256 << 10


class _NixlOffer(offers.Origin, frozen=True):
    """metadata: of the producer's agent. regions: int64 [regions, 8], per region its address, shape
    [B, H, N, C] and strides of B, H and N. token_at: the address of `token`, in host memory. gpu:
    the device's number; -1: host memory. rdma: whether its host has a device for it."""

    backend: str
    metadata: bytes
    regions: bytes
    token_at: int
    gpu: int
    rdma: bool
    board: LeaseBoardOffer | None = None


_decode_offer = msgspec.msgpack.Decoder(_NixlOffer).decode


class NixlSender(offers.NamingSender):
    """Registers memory and names blocks; moves nothing itself."""

    name = NAME

    def __init__(
        self,
        cache: BlockCache,
        settings: NixlSettings,
        host: str,
        board: LeaseBoard | None = None,
    ) -> None:
        self._token, self._board = secrets.token_bytes(_TOKEN_BYTES), board
        self._probe = np.frombuffer(self._token, np.uint8).copy()
        self._agent: Agent | None = None
        self._readers: AllowedReaders | None = None
        self._offer = b""
        try:
            self._offer = self._register(cache, settings, host)
        except TransferError as error:
            logger.warning("%s is not offered: %s", NAME, error)
            self._end()

    def offer(self) -> bytes:
        """Empty if NIXL is not installed, or does not work here."""
        return self._offer

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        self._end()

    def _end(self) -> None:
        self._probe[:] = 0  # opening an old offer fails from now on
        self._offer = b""
        if self._readers is not None:
            self._readers.close()
        if self._agent is not None:
            self._agent.close()

    def _register(self, cache: BlockCache, settings: NixlSettings, host: str) -> bytes:
        agent = self._agent = _agent(cache, settings, host, serves=True)
        agent.register([_token_span(self._probe)], on_host=True)
        metadata = agent.metadata()
        if len(metadata) > _MOST_METADATA:
            raise TransferError(f"its metadata has {len(metadata)} bytes", reason=NAME)
        self._readers = AllowedReaders() if cache.on_host else None
        rows = np.column_stack([_addresses(cache), offers.geometry(cache)])
        return msgspec.msgpack.encode(
            _NixlOffer.here(
                token=self._token,
                backend=settings.backend,
                metadata=metadata,
                regions=rows.tobytes(),
                token_at=self._probe.ctypes.data,
                gpu=_gpu(cache),
                rdma=library.has_rdma(),
                board=board_offer(self._board),
            )
        )


class _NixlCache(BoardCache):
    """A cache that another agent registered."""

    name = NAME

    def __init__(self, ours: BlockCache, offer: _NixlOffer, link: Link) -> None:
        rows = np.frombuffer(offer.regions, np.int64).reshape(-1, 8)
        board = open_board(NAME, offer.pid, offer.board) if offer.is_on_this_host() else None
        super().__init__(offer.token, ours, offers.unbacked(rows[:, 1:]), board)
        self._link, self._offer = link, offer
        self._addresses, self._addresses_here = rows[:, 0], _addresses(ours)

    def is_alive(self) -> bool:
        # Of another host's process only the control connection tells (`Peers`).
        return not self._offer.is_on_this_host() or self._offer.is_alive()

    def _copy(self, blocks: Selection, job: FetchJob) -> int:
        near = Side(self._ours, self._addresses_here, job.blocks)
        far = Side(self._theirs, self._addresses, blocks)
        if job.blocks.unit != blocks.unit:
            raise DataCorrupt("the two sides do not mean the same selection", reason="range")
        if job.after is not None:
            Wait(job.deadline).until(job.after.is_done)
        self._link.read(reads(near, far, self._link.threads), job.deadline)
        return self._ours.num_bytes(job.blocks)


class NixlReceiver:
    """Reads into the cache: one copy, no staging. One agent for each producer, without a thread."""

    name = NAME

    def __init__(self, cache: BlockCache, settings: NixlSettings, host: str) -> None:
        self._cache, self._settings, self._host = cache, settings, host
        self._refusals = offers.Refusals(NAME)
        # A link ends with the last cache that uses it: when `Peers` forgets the producer.
        self._links: weakref.WeakValueDictionary[bytes, Link] = weakref.WeakValueDictionary()
        copies = cache.on_host and settings.backend == "UCX"
        self._helpers = HelperThreads("disagg-nixl") if copies else None

    def open(self, offer: bytes) -> _NixlCache | None:
        return self._refusals.opened(self._open, offer)

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        if self._helpers is not None:
            self._helpers.close()

    def _open(self, offer: bytes) -> _NixlCache:
        if not offer:
            raise TransferError("the producer has no NIXL that works")
        theirs = _decode_offer(offer)
        self._check(theirs)
        link = self._links.get(theirs.token)
        if link is None:
            link = self._link(theirs)
        opened = _NixlCache(self._cache, theirs, link)
        self._links[theirs.token] = link
        return opened

    def _check(self, theirs: _NixlOffer) -> None:
        """Raise `TransferError` where it cannot work, or the producer would have to take part."""
        if theirs.backend != self._settings.backend:
            raise TransferError("the producer's transfer.nixl.backend is another")
        if (theirs.gpu < 0) != self._cache.on_host:
            raise TransferError("one cache is host memory, the other one device memory")
        here = theirs.is_on_this_host()
        if here:
            theirs.check_reachable()
        if self._settings.tcp or self._settings.backend != "UCX":
            return
        if here and self._cache.on_host:
            peek(theirs.pid, theirs.token_at, _TOKEN_BYTES)
        elif not here and not (theirs.rdma and library.has_rdma()):
            raise TransferError(
                "no device for RDMA on both hosts; UCX's TCP is not used, transport tcp is"
            )

    def _link(self, theirs: _NixlOffer) -> Link:
        found = np.zeros(_TOKEN_BYTES, np.uint8)
        # Within one host the reading threads copy; a network's device needs none of them.
        helpers = self._helpers if theirs.is_on_this_host() else None
        # Twice as many as threads: several fetches at once took 1.3 times as long with as many.
        workers = 2 * helpers.together if helpers is not None else 1

        def connect() -> Agent:
            agent = _agent(self._cache, self._settings, self._host, serves=False, workers=workers)
            agent.register([_token_span(found)], on_host=True)
            agent.meet(theirs.metadata)
            return agent

        link = Link(connect, max(0, theirs.gpu), helpers)
        deadline = Deadline.after(_TOKEN_S)
        with link.using(deadline) as agent:
            handle = agent.read_token(_token_span(found), theirs.token_at)
            agent.begin(handle)
            link.wait(agent, handle, deadline)
            if found.tobytes() != theirs.token:
                raise TransferError("the producer's token is not where it should be")
        return link


def _agent(
    cache: BlockCache, settings: NixlSettings, host: str, *, serves: bool, workers: int = 1
) -> Agent:
    """An agent with this cache's memory."""
    gpu = _gpu(cache)
    kind = "DRAM" if gpu < 0 else "VRAM"
    device = max(0, gpu)
    agent = Agent(settings, host, serves=serves, kind=kind, device=device, workers=workers)
    agent.register(_spans(cache))
    return agent


def _gpu(cache: BlockCache) -> int:
    """The number of the cache's GPU; -1 for host memory."""
    return -1 if cache.on_host else int(cache.regions[0].memory.device.index or 0)


def _spans(cache: BlockCache) -> list[Span]:
    """The memory of all regions; those that overlap or touch are one span."""
    pairs = zip(_addresses(cache).tolist(), cache.regions, strict=True)
    spans: list[Span] = []
    for at, size in sorted((at, offers.extent(region)) for at, region in pairs):
        if spans and at <= sum(spans[-1]):
            first, length = spans[-1]
            spans[-1] = first, max(length, at + size - first)
        else:
            spans.append((at, size))
    return spans


def _addresses(cache: BlockCache) -> Ints:
    return np.array([region.memory.data_ptr() for region in cache.regions], np.int64)


def _token_span(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Span:
    return memory.ctypes.data, len(memory)
