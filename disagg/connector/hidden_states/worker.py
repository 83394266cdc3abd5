"""The worker half: takes vLLM's cache of hidden states, and passes each step's work to the writer.

Hidden states are equal on all tensor-parallel ranks, so only rank 0 writes; the other ranks do
nothing. vLLM calls in from its model loop; nothing may block it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from disagg.connector.hidden_states.device import DeviceBlocks
from disagg.connector.hidden_states.messages import StepWork, WriterAddress
from disagg.connector.hidden_states.metrics import HiddenStatesStats
from disagg.connector.hidden_states.settings import HiddenStatesSettings
from disagg.connector.hidden_states.writer import HiddenStatesWriter
from disagg.errors import ConfigError

logger = logging.getLogger(__name__)

# vLLM waits a few seconds for its workers, then kills them.
_CLOSE_S = 3.0


class WorkerHalf:
    """Worker side of `HiddenStatesConnector`."""

    def __init__(
        self,
        settings: HiddenStatesSettings,
        *,
        rank: int,
        block_size: int,
        layer_ids: Sequence[int],
    ) -> None:
        self._settings, self._rank = settings, rank
        self._block_size, self._layer_ids = block_size, layer_ids
        self._writer: HiddenStatesWriter | None = None

    def register_cache(self, layer: str, cache: torch.Tensor) -> None:
        """cache: [blocks, hidden states, tokens, hidden size], in any layout."""
        if self._rank != 0:
            return
        due = (len(self._layer_ids), self._block_size)
        if cache.dim() != 4 or tuple(cache.shape[1:3]) != due:
            raise ConfigError(
                f"block_size: the cache of {layer} is {list(cache.shape)}, where [blocks, "
                f"{due[0]}, {due[1]}, hidden size] is expected; choose another block size"
            )
        if cache.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"device: {cache.device.type} — hidden states are read from CPUs and CUDA GPUs"
            )
        folder = self._settings.folder()
        try:
            self._writer = HiddenStatesWriter(
                folder,
                DeviceBlocks(cache, self._settings.buffer_bytes),
                num_threads=self._settings.num_writer_threads,
                layer_ids=self._layer_ids,
            )
        except OSError as error:
            raise ConfigError(
                "kv_connector_extra_config.shared_storage_path: no files can be written and "
                f"locked in {folder.path} ({error})"
            ) from error
        logger.info(
            "hidden states of layers %s go to %s, life %s",
            ", ".join(map(str, self._layer_ids)),
            folder.path,
            self._writer.life,
        )

    def address(self) -> WriterAddress | None:
        """The writer's folder and life, for paths; None if this rank does not write."""
        if self._writer is None:
            return None
        return WriterAddress(str(self._writer.folder.path), self._writer.life)

    def start(self, work: StepWork) -> None:
        """Begin the work of this step."""
        if self._writer is None:
            return
        for number in work.promises:
            self._writer.promise(number)
        for number in work.withdrawals:
            self._writer.withdraw(number)
        for save in work.saves:
            self._writer.submit(save)

    def read(self) -> set[str]:
        """Requests whose blocks may be freed, since the last call."""
        return self._writer.take_read() if self._writer is not None else set()

    def take_stats(self) -> HiddenStatesStats:
        """Counts since the last call."""
        stats = HiddenStatesStats()
        for ended in self._writer.take_ended() if self._writer is not None else ():
            stats.count(ended)
        return stats

    def shutdown(self) -> None:
        """Finish pending writes, for up to 3 s."""
        if self._writer is not None:
            self._writer.close(_CLOSE_S)
            self._writer = None
