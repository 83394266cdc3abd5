"""When a decode engine computes a prompt that would wait for prefill (`prefill_wait_share`).

That gives the request an earlier first token, but all other requests at that decode engine wait
meanwhile. Only the slowest requests determine the p99 of the time to first token. So a request
outside the slowest 10 % moves to decode only if that saves four times the threshold.
"""

from __future__ import annotations

from disagg.router.pairing.tail_latency import TailLatency

_OUTSIDE_TAIL = 4.0


class LocalPrefill:
    """The decisions of one router process. `share`: `prefill_wait_share`."""

    def __init__(self, share: float) -> None:
        self._share, self._latency = share, TailLatency()

    def is_worth_it(self, prefill_s: float, decode_s: float, takes_s: float, requests: int) -> bool:
        """Whether decode should compute this prompt.

        `prefill_s`, `decode_s`: the wait until an engine of that role begins with it. `takes_s`:
        the time to compute it. `requests`: at the decode engine, this one included. Must be called
        for every prompt that either role may compute.
        """
        is_tail = self._latency.is_tail(prefill_s + takes_s)
        share = self._share if is_tail else self._share * _OUTSIDE_TAIL
        return prefill_s - decode_s > share * takes_s * requests
