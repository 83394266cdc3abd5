"""Copies hidden states from the device: on a side stream, into pinned memory, during the model.

Legend for shapes: B blocks, S hidden states of a token (one per requested layer), N tokens of a
block, H hidden size.
"""

from __future__ import annotations

import threading

import torch


class DeviceBlocks:
    """vLLM's cache of hidden states, read block by block. `read` is thread-safe.

    On a GPU every read uses one side stream, so that the model's stream never waits. Elsewhere the
    cache is in host memory, and a read is a plain copy.
    """

    def __init__(self, cache: torch.Tensor, buffer_bytes: int) -> None:
        """cache: [B, S, N, H] with any strides."""
        # As [B, N, S, H]: a token's states together, whatever the layout.
        self._cache = cache.permute(0, 2, 1, 3)
        block = self._cache[0]
        self.dtype = cache.dtype
        self.block_size = block.shape[0]
        self.token_shape = (block.shape[1], block.shape[2])
        self.blocks_per_read = max(1, buffer_bytes // (block.numel() * cache.itemsize))
        self._shape = (self.blocks_per_read, *block.shape)
        self._stream: torch.cuda.Stream | None = None
        if cache.is_cuda:
            self._stream = torch.cuda.Stream(cache.device)
            # Reads run one after the other on the stream, so they can share this buffer.
            self._gathered = torch.empty(self._shape, dtype=cache.dtype, device=cache.device)
            self._launching = threading.Lock()

    def new_buffer(self) -> torch.Tensor:
        """Host memory for one read: [blocks_per_read, N, S, H]."""
        return torch.empty(self._shape, dtype=self.dtype, pin_memory=self._stream is not None)

    def mark(self) -> torch.cuda.Event | None:
        """An event on the model's stream; a `read` after it sees everything written before it."""
        if self._stream is None:
            return None
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(self._cache.device))
        return written

    @torch.inference_mode()
    def read(
        self, block_ids: list[int], written: torch.cuda.Event | None, buffer: torch.Tensor
    ) -> torch.Tensor:
        """Copy blocks into the front of the buffer; returns it as [tokens, S, H] when complete.

        block_ids: at most `blocks_per_read`. written: what `mark` returned.
        """
        ids, out = torch.tensor(block_ids, dtype=torch.int64), buffer[: len(block_ids)]
        if self._stream is None:
            torch.index_select(self._cache, 0, ids, out=out)
        else:
            self._copy(ids, written, out).synchronize()
        return out.flatten(0, 1)

    def _copy(
        self, ids: torch.Tensor, written: torch.cuda.Event | None, out: torch.Tensor
    ) -> torch.cuda.Event:
        assert self._stream is not None
        # Blocking: a waiting thread sleeps.
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.device(self._cache.device), torch.cuda.stream(self._stream):
            # Gather the blocks on the device, so that they leave it in one copy.
            on_device = ids.to(self._cache.device, non_blocking=True)
            if written is not None:
                self._stream.wait_event(written)
            gathered = self._gathered[: len(ids)]
            with self._launching:
                torch.index_select(self._cache, 0, on_device, out=gathered)
                out.copy_(gathered, non_blocking=True)
                copied.record(self._stream)
        return copied
