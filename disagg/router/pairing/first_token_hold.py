"""How long the router holds back prefill's first token until decode answers (`first_token_hold_s`).

Holding it shortens the pause after the first token, and lengthens the time to the first token. A
request that has waited longer than 90 % of the others is not held: such requests make the p99 of
the time to first token.
"""

from __future__ import annotations

from disagg.router.pairing.tail_latency import TailLatency


class FirstTokenHold:
    """The holds of one router process."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s, self._latency = hold_s, TailLatency()

    def of(self, waited_s: float) -> float:
        """The hold in seconds for a request that arrived `waited_s` ago; 0 if 90 % of the last
        requests waited less."""
        if not self._hold_s or self._latency.is_tail(waited_s):
            return 0.0
        return self._hold_s
