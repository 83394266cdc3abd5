"""When decode reads a prompt that would wait for prefill (`prefill_wait_share`).

It makes that request's first token come sooner, and all that decode has wait meanwhile. First
tokens at p99 are those of the few who would wait longest; to help the others costs as much and
gains nothing there, so it has to be worth four times as much.
"""

from __future__ import annotations

from disagg.router.pairing.tail_latency import TailLatency

_OTHERS = 4.0


class LocalPrefill:
    """Of one router process."""

    def __init__(self, share: float) -> None:
        self._share, self._slowest = share, TailLatency()

    def is_worth_it(self, prefill_s: float, decode_s: float, takes_s: float, requests: int) -> bool:
        """Whether decode shall read a prompt that takes `takes_s` to read and would come to its
        turn after so long there and at prefill. `requests`: that decode has, this one among them.

        To be asked of every prompt that may be read at either.
        """
        is_slow = self._slowest.has(prefill_s + takes_s)
        share = self._share if is_slow else self._share * _OTHERS
        return prefill_s - decode_s > share * takes_s * requests
