"""A writer in a process of its own: `written_elsewhere.py FOLDER HOW`. Prints the path, waits.

HOW: "stalls" writes a piece and no more; "small" may not write files over 64 KiB;
"waits" promises and does nothing.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from disagg.connector.hidden_states import naming
from disagg.connector.hidden_states.device import DeviceBlocks
from disagg.connector.hidden_states.writer import HiddenStatesWriter, Save
from disagg.private_files import PrivateFolder

BLOCK, STATES, HIDDEN, NUM_BLOCKS = 32, 3, 64, 64


class Stalling(DeviceBlocks):
    """A device whose second read never ends."""

    reads = 0
    stalled = threading.Event()

    def read(self, *args: Any) -> torch.Tensor:
        self.reads += 1
        if self.reads > 1:
            self.stalled.set()
            time.sleep(3600)
        return super().read(*args)


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    cache = torch.randn(NUM_BLOCKS, STATES, BLOCK, HIDDEN)
    kind = Stalling if how == "stalls" else DeviceBlocks
    blocks = kind(cache, BLOCK * STATES * HIDDEN * 4 * 16)
    writer = HiddenStatesWriter(PrivateFolder(folder), blocks, num_threads=2, layer_ids=[1, 2, 3])
    if how == "small":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    writer.promise(1)
    path = str(folder / naming.file_name("one", writer.life, 1))
    if how != "waits":
        tokens = list(range(BLOCK * NUM_BLOCKS))
        writer.submit(Save("one", path, tokens, list(range(NUM_BLOCKS))))
    if how == "stalls":
        Stalling.stalled.wait()
    print(path, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
