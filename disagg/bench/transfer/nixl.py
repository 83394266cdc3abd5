"""The peer of `bench transfer`: NIXL over UCX reads the same blocks between two processes.

As vLLM's NixlConnector does it: one descriptor per block and layer, prepared once on both sides;
a read of some of them by index, with a notification, polled until done, then released. One setting
of UCX per pair of processes, because UCX reads its environment when it is loaded. The times do not
include the round trips of NixlConnector's lease bookkeeping.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, util
from typing import Any

import numpy as np
import torch

from disagg.bench.transfer.memory import LAYERS, BenchMemory, offsets
from disagg.errors import DisaggError

INSTALL = (
    "install it with: pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1  (60 MB; without its "
    "dependencies, since it asks for torch again)"
)
_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
_READ_S = 30.0


@dataclass(frozen=True)
class Setting:
    """A setting of NIXL. `progress`: its polling thread, on by default in NIXL and vLLM.

    `tls` is UCX_TLS. `errors`: ucx_error_handling_mode; NIXL's default is "peer", with which most
    of UCX's transports do not work alone.
    """

    tls: str
    progress: bool = False
    threads: int = 0
    errors: str = "peer"

    @property
    def label(self) -> str:
        """The row's name."""
        notes = ["thread"] if self.progress else []
        notes += [f"{self.threads} workers"] if self.threads else []
        notes += ["no errors"] if self.errors != "peer" else []
        return f"nixl {self.tls}{' +' if notes else ''}{', '.join(notes)}"

    @property
    def is_tcp(self) -> bool:
        """Whether bytes can only go over sockets."""
        return "tcp" in self.tls and not {"sm", "cma", "posix", "sysv"} & set(self.tls.split(","))


SETTINGS = {
    "cpu": (
        Setting("sm,self,tcp"),
        Setting("sm,self,tcp", progress=True, threads=4),  # as vLLM runs it
        Setting("posix,sysv,cma,self", errors="none"),
        Setting("tcp,self"),
        Setting("tcp,self", progress=True),
    ),
    "cuda": (
        Setting("cuda_ipc,cuda_copy,sm,self,tcp"),
        Setting("cuda_ipc,cuda_copy,sm,self,tcp", progress=True, threads=4),
        Setting("cuda_copy,tcp,self"),
    ),
}  # fmt: skip


def installed() -> bool:
    """Whether one of NIXL's packages is installed."""
    return any(util.find_spec(name) is not None for name in _PACKAGES)


class _End:
    """An agent and its registered memory."""

    def __init__(self, name: str, setting: Setting, num_bytes: int, device: str) -> None:
        torch.set_num_threads(1)
        self._setting = setting
        package = next(name for name in _PACKAGES if util.find_spec(name) is not None)
        # Importing the metapackage makes its `_api` available.
        import_module(package)
        api: Any = import_module(f"{package}._api")
        config = api.nixl_agent_config(backends=[], enable_prog_thread=setting.progress)
        self.agent: Any = api.nixl_agent(name, config)
        params = {"ucx_error_handling_mode": setting.errors}
        if setting.threads:
            params["num_threads"] = str(setting.threads)
        self.agent.create_backend("UCX", params)
        self.memory = BenchMemory(num_bytes, device)
        self.kind = "VRAM" if self.memory.flat.is_cuda else "DRAM"
        self.address = self.memory.flat.data_ptr()
        size = self.memory.flat.numel()
        self.agent.register_memory([(self.address, size, 0, "")], self.kind)


class NixlProducer(_End):
    """The passive end."""

    def __init__(self, setting: Setting, num_bytes: int, device: str) -> None:
        super().__init__("producer", setting, num_bytes, device)
        self.memory.fill()

    def metadata(self) -> tuple[bytes, int]:
        """The agent's metadata and the memory's address, for the consumer."""
        return self.agent.get_agent_metadata(), self.address

    def attend(self, notification: bytes, count: int) -> None:
        """Drive the agent until `count` notifications of the consumer's reads have arrived."""
        until, seen = time.monotonic() + _READ_S, 0
        while seen < count:
            for messages in self.agent.get_new_notifs().values():
                seen += sum(message == notification for message in messages)
            if time.monotonic() > until:
                raise DisaggError(f"no notification of the reads after {_READ_S:g} s")
            # Over sockets this end sends, and only within get_new_notifs.
            time.sleep(0 if self._setting.is_tcp else 2e-4)


class NixlConsumer(_End):
    """The reading end."""

    def __init__(self, setting: Setting, num_bytes: int, device: str) -> None:
        super().__init__("consumer", setting, num_bytes, device)
        self._prepared: tuple[Any, Any] | None = None

    def connect(self, metadata: bytes, address: int) -> None:
        """Connect to the producer."""
        name = self.agent.add_remote_agent(metadata)
        self._remote = (name if isinstance(name, str) else name.decode()), address

    def prepare(self, block_bytes: int) -> None:
        """Descriptors for all blocks of this size, in both memories."""
        for handle in self._prepared or ():
            handle.release()
        self._block_bytes = block_bytes
        layer = self.memory.flat.shape[1]
        self._blocks = layer // block_bytes
        starts = offsets(range(self._blocks), block_bytes, layer)

        def descriptors(address: int) -> Any:
            rows = np.zeros((len(starts), 3), np.uint64)
            rows[:, 0] = starts.astype(np.uint64) + np.uint64(address)
            rows[:, 1] = block_bytes
            return rows

        name, address = self._remote
        self._prepared = (
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", descriptors(self.address), self.kind),
            self.agent.prep_xfer_dlist(name, descriptors(address), self.kind),
        )

    def read(
        self, notification: bytes, here: Sequence[Sequence[int]], there: Sequence[Sequence[int]]
    ) -> float:
        """Seconds until all reads are done; several are posted at once and polled in turn."""
        assert self._prepared is not None
        local, remote = self._prepared
        began = time.perf_counter()
        handles = []
        for ours, theirs in zip(here, there, strict=True):
            handle = self.agent.make_prepped_xfer(
                "READ", local, self._indices(ours), remote, self._indices(theirs), notification
            )
            handles.append((handle, self.agent.transfer(handle)))
        left = [handle for handle, state in handles if self._goes_on(state)]
        while left:
            if time.perf_counter() - began > _READ_S:
                raise DisaggError(f"read not done after {_READ_S:g} s")
            left = [h for h in left if self._goes_on(self.agent.check_xfer_state(h))]
        for handle, _ in handles:
            self.agent.release_xfer_handle(handle)
        return time.perf_counter() - began

    def wipe(self) -> None:
        """Zero the memory."""
        self.memory.wipe()

    def wrong_blocks(self, here: Sequence[Sequence[int]], there: Sequence[Sequence[int]]) -> int:
        """How many blocks differ from the source's."""
        size = self._block_bytes
        return sum(self.memory.wrong_blocks(size, *pair) for pair in zip(here, there, strict=True))

    def _indices(self, ids: Sequence[int]) -> Any:
        layers = np.arange(LAYERS, dtype=np.int32)[:, None] * self._blocks
        return (layers + np.asarray(ids, np.int32)).reshape(-1).astype(np.int32)

    @staticmethod
    def _goes_on(state: str) -> bool:
        if state == "ERR":
            raise DisaggError("NIXL reports an error")
        return state != "DONE"
