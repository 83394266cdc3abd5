"""vLLM's scheduler, for tests that need a prompt to stand still in its middle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from disagg.testing.vllm_server import HOLD_OPTION

_LOOK_S, _LONGEST_S = 0.002, 120.0


class HeldScheduler(AsyncScheduler):
    """It stands still before a step while the hold file exists and names a share of the KV cache
    that is in use. It creates `held` beside that file then. All else is vLLM's."""

    def schedule(self, *args: Any, **options: Any) -> Any:
        """As vLLM's."""
        given: Any = self.vllm_config.additional_config
        hold = Path(given[HOLD_OPTION])
        deadline = time.monotonic() + _LONGEST_S
        while self._is_held(hold) and time.monotonic() < deadline:
            hold.with_name("held").touch()
            time.sleep(_LOOK_S)
        return super().schedule(*args, **options)

    def _is_held(self, hold: Path) -> bool:
        try:
            return self.kv_cache_manager.usage >= float(hold.read_text())
        except FileNotFoundError:
            return False
