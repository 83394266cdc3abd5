"""A producer's device memory as mapped by a consumer, and the offer that makes it possible.

Memory is never unmapped while a kernel reads it: the fault would end this process's use of its GPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import msgspec
import numpy as np

from disagg.errors import PeerLost, TransferError
from disagg.transport.device.base import Device, DeviceMemory
from disagg.transport.one_sided import offers
from disagg.transport.one_sided.remote_lease_board import LeaseBoardOffer, RemoteLeaseBoard

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
GONE = "the producer's process is gone, or its memory was unmapped"


class CudaIpcOffer(offers.Origin, frozen=True):
    """Which process, and where its cache lies. allocations: handle and size of each. regions: int64
    [regions, 9], per region the number of its allocation, its offset there, shape [B, H, N, C] and
    strides of B, H and N. token_at: the token's allocation number and offset."""

    allocations: list[tuple[bytes, int]]
    regions: bytes
    token_at: tuple[int, int]
    board: LeaseBoardOffer | None = None


decode_offer = msgspec.msgpack.Decoder(CudaIpcOffer).decode


class MappedCache:
    """A producer's memory as mapped here, and the geometry of its cache.

    proven: its token was read, and the end of its process will be noticed. closed: no further read
    begins. board: set when proven; None if the producer has to be asked for leases.
    """

    def __init__(self, offer: CudaIpcOffer, device: Device) -> None:
        self.offer, self._device = offer, device
        rows = np.frombuffer(offer.regions, np.int64).reshape(-1, 9)
        self.cache = offers.unbacked(rows[:, 2:])
        self._places: list[tuple[int, int]] = [(row[0], row[1]) for row in rows.tolist()]
        sizes = [offers.extent(region) for region in self.cache.regions]
        every = [*zip(self._places, sizes, strict=True), (offer.token_at, TOKEN_BYTES)]
        for (number, offset), size in every:
            if number < 0 or not 0 <= offset <= offer.allocations[number][1] - size:
                raise ValueError("a region or the token lies outside of its allocation")
        self.proven = self.closed = False
        self.board: RemoteLeaseBoard | None = None
        self._mapped: list[DeviceMemory] = []
        self._reads = 0
        self._lock = threading.Lock()

    def map(self) -> None:
        """Make its memory readable here. `close` must follow, even if this raises."""
        for handle, _ in self.offer.allocations:
            self._mapped.append(self._device.open(handle))

    def addresses(self) -> list[int]:
        """Of its regions; valid within `reading`."""
        return [self._address(place) for place in self._places]

    def token_address(self) -> int:
        """Of its token; valid within `reading`."""
        return self._address(self.offer.token_at)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """One read, which must have ended on the device when the context ends."""
        with self._lock:
            self.check()
            self._reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads -= 1
                self._unmap_when_unread()

    def check(self) -> None:
        """Raise `PeerLost` if it is closed."""
        if self.closed:
            raise PeerLost(GONE)

    def close(self) -> None:
        """Unmap it as soon as no read is under way; none begins after this."""
        with self._lock:
            self.closed = True
            self._unmap_when_unread()

    def _unmap_when_unread(self) -> None:
        if not self.closed or self._reads:
            return
        mapped, self._mapped = self._mapped, []
        for memory in mapped:
            try:
                self._device.use()
                memory.free()
            except TransferError as error:
                logger.warning("cuda_ipc: a producer's memory stays mapped: %s", error)

    def _address(self, place: tuple[int, int]) -> int:
        return self._mapped[place[0]].address + place[1]
