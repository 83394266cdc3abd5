"""One NIXL agent: its registered memory, its peer, and transfers that surely end.

A transfer that NIXL gives up may still write. Measured with NIXL 1.5 over UCX: after a read was
released, or its peer removed (`invalidateRemoteMD`), the rest of its bytes arrived when the stopped
peer ran on, in memory that was long somebody else's. The one sure end is the agent's own: without
it there is nothing that could write. So an agent reads from one producer only, and after any error
it is ended, before the blocks go back (`link.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.errors import PeerLost, TransferError
from disagg.transport.blocks import Ints
from disagg.transport.nixl import library
from disagg.transport.nixl.library import NAME
from disagg.transport.nixl.settings import NixlSettings

# A span of memory: its address and length.
Span = tuple[int, int]


class Agent:
    """Its calls may come from several threads, except `close`, which comes last.

    serves: whether others read from this agent's memory; only then it has a thread. kind: NIXL's
    name of the memory, "DRAM" or "VRAM". device: the GPU's number; 0 for host memory. workers: how
    many threads may move bytes at once; NIXL gives each thread the next of UCX's workers. Every
    method raises `TransferError` with reason "nixl".
    """

    def __init__(
        self,
        settings: NixlSettings,
        host: str,
        *,
        serves: bool,
        kind: str = "DRAM",
        device: int = 0,
        workers: int = 1,
    ) -> None:
        self._library = library.load(host)
        bindings = self._bindings = self._library.bindings
        self._kind, self._device = getattr(bindings, f"{kind}_SEG"), device
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread = serves, False
        config.pthrDelay = library.sleep_us(settings)
        sync = bindings.nixl_thread_sync_t
        # Strict: one call at a time.
        strict = sync.NIXL_THREAD_SYNC_STRICT
        config.syncMode = sync.NIXL_THREAD_SYNC_RW if workers > 1 else strict
        config.captureTelemetry = False
        try:
            self._agent: Any = bindings.nixlAgent(f"disagg-{secrets.token_hex(8)}", config)
            self._agent.createBackend(settings.backend, library.params(settings, workers))
        except self._library.errors as error:
            text = f"NIXL's backend {settings.backend} does not start: {error}"
            raise TransferError(text, reason=NAME) from error
        self._peer = ""

    def register(self, spans: Sequence[Span], *, on_host: bool = False) -> None:
        """Let transfers use this memory. on_host: whatever the agent's kind of memory is."""
        rows = [(at, size, 0 if on_host else self._device, "") for at, size in spans]
        kind = self._bindings.DRAM_SEG if on_host else self._kind
        self._call("registerMem", self._bindings.nixlRegDList(kind, rows))

    def metadata(self) -> bytes:
        """What a peer needs to read from the registered memory."""
        found: bytes = self._call("getLocalMD")
        return found

    def meet(self, metadata: bytes) -> None:
        """Read from the agent with this metadata from now on."""
        self._peer = self._call("loadRemoteMD", metadata).decode(errors="replace")

    def read(self, near: Ints, far: Ints, lengths: Ints | int, device: int) -> int:
        """A read of pieces of these lengths, from the peer's addresses `far` to ours. device: of
        the peer's memory. Returns a handle; `begin` begins it."""
        ours = self._list(near, lengths, self._device)
        theirs = self._list(far, lengths, device)
        return self._read(self._kind, ours, self._kind, theirs)

    def read_token(self, near: Span, far: int) -> int:
        """The same for one piece between host memories."""
        host = self._bindings.DRAM_SEG
        ours = self._list(np.array([near[0]], np.int64), near[1], 0)
        theirs = self._list(np.array([far], np.int64), near[1], 0)
        return self._read(host, ours, host, theirs)

    def begin(self, handle: int) -> None:
        """Begin a read. Between processes of one host this call may copy all of it."""
        self._call("postXferReq", handle)

    def is_done(self, handle: int) -> bool:
        """Whether a read has ended; it is then forgotten. Over most networks it goes on only within
        this call."""
        status = self._call("getXferStatus", handle)
        if status == self._bindings.NIXL_IN_PROG:
            return False
        if status != self._bindings.NIXL_SUCCESS:
            raise TransferError(f"NIXL's read ended with {status}", reason=NAME)
        self._call("releaseXferReq", handle)
        return True

    def close(self) -> None:
        """End the agent. When it returns, nothing reads or writes for it any more."""
        self._agent = None

    def _list(self, at: Ints, lengths: Ints | int, device: int) -> npt.NDArray[np.uint64]:
        rows = np.empty((len(at), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = at, lengths, device
        return rows

    def _read(self, kind: Any, ours: Any, far_kind: Any, theirs: Any) -> int:
        lists = self._bindings.nixlXferDList
        handle: int = self._call(
            "createXferReq",
            self._bindings.NIXL_READ,
            lists(kind, ours),
            lists(far_kind, theirs),
            self._peer,
        )
        return handle

    def _call(self, method: str, *args: Any) -> Any:
        if self._agent is None:
            raise TransferError("NIXL's agent was closed", reason="nixl_closed")
        try:
            # In no variable of this frame: an error's traceback would keep the agent from ending.
            return getattr(self._agent, method)(*args)
        except self._library.errors as error:
            if "Disconnect" in type(error).__name__:
                raise PeerLost("NIXL lost its connection to the producer") from error
            raise TransferError(f"NIXL's {method} failed: {error}", reason=NAME) from error
