"""A connector for real engines: `DisaggConnector`, which also writes down what it was given.

In `--kv-transfer-config`: `RecordingConnector` of the module `gpu_layouts.recorder`. It writes the
file that the environment's `RECORD` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from gpu_layouts.description import RECORD, described

from disagg.connector.handoff.connector import DisaggConnector


class RecordingConnector(DisaggConnector):
    """Hands over as `DisaggConnector` does."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        found = described(self._vllm_config, self._kv_cache_config, kv_caches)
        Path(os.environ[RECORD]).write_text(json.dumps(found))
        super().register_kv_caches(kv_caches)
