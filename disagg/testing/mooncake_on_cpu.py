"""vLLM's MooncakeConnector on engines without an accelerator.

Unchanged, it ends there with `RuntimeError: Cannot access accelerator device when none is
available`: each worker asks torch for the index of its device, and passes it on to a function that
ignores it.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector


class MooncakeConnector(mooncake_connector.MooncakeConnector):
    """All of it is vLLM's but that answer."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with patch.object(torch.accelerator, "current_device_index", return_value=0):
            super().__init__(vllm_config, role, kv_cache_config)
