"""Notices when decode computes most prompts although prefill engines have nothing to do.

Each such decision may be right. All together they may also mean that a setting or an estimate is
wrong, and that half of the engines are of no use. So one line in the log and a metric say it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

from disagg.router.telemetry.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_LATELY = 200
"""Requests that are looked at."""
_MOST, _FEW = 0.5, 0.3

_SETTINGS = {
    "short_prompt": "router.pairing.local_prefill_tokens",
    "prefix_known": "router.pairing.local_prefill_tokens",
    "prefill_busy": "router.pairing.prefill_wait_share",
}


class IdlePrefill:
    """The last decisions of one router process."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._lately: deque[str | None] = deque()
        self._reasons: Counter[str | None] = Counter()
        self._is_said = False
        metrics.idle_prefill.set_function(self.share)

    def note(self, reason: str | None, *, is_idle: bool) -> None:
        """A prompt was computed by decode for this reason, or by prefill (None). `is_idle`: there
        are prefill engines, and none had a request."""
        kept = reason if is_idle else None
        self._lately.append(kept)
        self._reasons[kept] += 1
        if len(self._lately) <= _LATELY:
            return
        self._reasons[self._lately.popleft()] -= 1
        share = self.share()
        if self._is_said:
            self._is_said = share > _FEW
        elif share > _MOST:
            self._is_said = True
            self._say(share)

    def share(self) -> float:
        """Of the last requests, those that decode computed while prefill was idle."""
        if not self._lately:
            return 0.0
        return 1 - self._reasons[None] / len(self._lately)

    def _say(self, share: float) -> None:
        often = max((name for name in self._reasons if name), key=self._reasons.__getitem__)
        setting = _SETTINGS.get(often)
        logger.warning(
            "decode computed the prompts of %.0f %% of the last %d requests while all prefill "
            "engines were idle; most because of %s%s",
            share * 100,
            _LATELY,
            often,
            f" (see {setting})" if setting else "",
        )
