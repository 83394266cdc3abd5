"""How long prefill's first token is held for what decode sends (`first_token_hold_s`).

A pause behind the first token is made shorter at the cost of the time before it. Who has waited
longer than most others need not wait for that too: of them is what the slowest first tokens are.
"""

from __future__ import annotations

from disagg.router.pairing.tail_latency import TailLatency


class FirstTokenHold:
    """Of one router process."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s, self._slowest = hold_s, TailLatency()

    def of(self, waited_s: float) -> float:
        """Seconds, of the first token of a request that came so long ago: none if that is longer
        than nine of ten waited lately."""
        if not self._hold_s or self._slowest.has(waited_s):
            return 0.0
        return self._hold_s
