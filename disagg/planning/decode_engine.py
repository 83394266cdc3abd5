"""A decode engine in the simulation: continuous batching, handoffs, and prompts computed locally.

Steps are counted one by one, but simulated in stretches. While no request arrives or finishes, each
step is longer than the step before by the same amount. So a whole stretch is one event, whatever
its length. A step that also computes prompts is one event.

Requests are admitted in the order of arrival. A request is admitted when the KV cache has room for
its prompt and its whole answer, and a seat of `max_num_seqs` is free. Then its handoff begins. vLLM
does not know the length of an answer: it admits earlier, and preempts if the cache gets full.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from disagg.planning.events import Clock
from disagg.planning.speeds import DecodeSpeed, HandoffSpeed


class TokenListener(Protocol):
    """Is called with the handoffs and the tokens of a decode engine."""

    def handoff_begins(self, now: float, request: int) -> None:
        """The engine has room for the request, and fetches its KV cache."""

    def first_token(self, now: float, request: int) -> None:
        """The engine made the answer's first token."""

    def last_token(self, now: float, request: int) -> None:
        """The engine made the answer's last token."""

    def gaps(self, first_s: float, last_s: float, count: int) -> None:
        """`count` times between two tokens, from `first_s` to `last_s` in even steps."""


class DecodeEngine:
    """Gets requests whose prompt a prefill engine computed, or that it computes itself."""

    __slots__ = (
        "_admitted",
        "_began",
        "_busy_s",
        "_clock",
        "_computed",
        "_context",
        "_fetching",
        "_finishing",
        "_gap_count",
        "_growth",
        "_handoff",
        "_is_local",
        "_joining",
        "_kv_used",
        "_listener",
        "_local",
        "_outputs",
        "_plan",
        "_prompts",
        "_running",
        "_sequence_s",
        "_speed",
        "_starting",
        "_step",
        "_step_s",
        "_steps",
        "_to_fetch",
        "_waiting",
    )

    def __init__(
        self,
        speed: DecodeSpeed,
        handoff: HandoffSpeed,
        sizes: tuple[Sequence[int], Sequence[int]],
        is_local: Callable[[int], bool],
        clock: Clock,
        listener: TokenListener,
    ) -> None:
        self._speed, self._handoff, self._is_local = speed, handoff, is_local
        self._prompts, self._outputs = sizes
        self._clock, self._listener = clock, listener
        # Requests that wait for room, for a handoff, and for the next step.
        self._waiting: deque[int] = deque()
        self._to_fetch: deque[int] = deque()
        self._joining: list[int] = []
        self._fetching = self._admitted = self._kv_used = 0
        # Prompts that are computed here, and the number of computed tokens of the first.
        self._local: deque[int] = deque()
        self._computed = 0
        self._finishing: list[int] = []
        # Running requests, each with the number of the step that makes its last token.
        self._running: list[tuple[int, int]] = []
        # `_context`: tokens of all running requests.
        self._context = self._step = 0
        # The current stretch: its steps (0: none), the time of its first step, the growth from step
        # to step. If a stretch is cut short, it gets a new plan, and the old plan's end is ignored.
        self._starting = False
        self._steps = self._plan = self._gap_count = 0
        self._began = self._step_s = self._growth = 0.0
        self._busy_s = self._sequence_s = 0.0

    def add(self, now: float, request: int) -> None:
        """A request arrives."""
        self._waiting.append(request)
        if self._admit(now):
            self._wake(now)

    def busy_s(self, now: float) -> tuple[float, float]:
        """Seconds so far in which it ran steps, and the sum over its sequences."""
        runs_s = now - self._began if self._steps else 0.0
        return self._busy_s + runs_s, self._sequence_s + runs_s * len(self._running)

    def _admit(self, now: float) -> bool:
        """Admit waiting requests in order. Returns whether there are prompts to compute here."""
        speed, waiting = self._speed, self._waiting
        while waiting and self._admitted < speed.max_num_seqs:
            request = waiting[0]
            need = self._prompts[request] + self._outputs[request]
            if self._kv_used + need > speed.kv_tokens:
                break
            waiting.popleft()
            self._kv_used += need
            self._admitted += 1
            if self._is_local(request):
                self._local.append(request)
            elif self._fetching < self._handoff.parallel:
                self._fetch(now, request)
            else:
                self._to_fetch.append(request)
        return bool(self._local)

    def _fetch(self, now: float, request: int) -> None:
        self._fetching += 1
        self._listener.handoff_begins(now, request)
        self._clock.at(now + self._handoff.takes(self._prompts[request]), self._fetched, request)

    def _fetched(self, now: float, request: int) -> None:
        self._fetching -= 1
        if self._to_fetch:
            self._fetch(now, self._to_fetch.popleft())
        self._joining.append(request)
        self._wake(now)

    # ---- steps -----------------------------------------------------------------------------

    def _wake(self, now: float) -> None:
        """A request joins: now if no step runs, else after the current step."""
        if self._steps == 0:
            if not self._starting:
                self._starting = True
                self._clock.at(now, self._begin, 0)  # together with other arrivals of this moment
        elif self._steps > 1:
            over = self._steps_until(now - self._began)
            if over < self._steps:
                self._schedule(over)

    def _steps_until(self, elapsed: float) -> int:
        """Steps of the stretch up to and including the one that runs after `elapsed` seconds."""
        first, growth = self._step_s, self._growth
        if growth > 0:
            half = first - growth / 2
            estimate = (math.sqrt(half * half + 2 * growth * elapsed) - half) / growth
        else:
            estimate = elapsed / first
        steps = max(1, math.ceil(estimate))
        # Rounding may be off by one, up or down.
        while steps > 1 and self._takes(steps - 1) >= elapsed:
            steps -= 1
        while self._takes(steps) < elapsed:
            steps += 1
        return steps

    def _takes(self, steps: int) -> float:
        return steps * self._step_s + self._growth * (steps * (steps - 1) / 2)

    def _schedule(self, steps: int) -> None:
        self._steps = steps
        self._plan += 1
        self._clock.at(self._began + self._takes(steps), self._end, self._plan)

    def _begin(self, now: float, _: int) -> None:
        speed, running = self._speed, self._running
        self._starting = False
        self._gap_count = len(running)
        for request in self._joining:
            # The handoff brought the prompt; the next step makes the first token.
            heapq.heappush(running, (self._step + self._outputs[request], request))
            self._context += self._prompts[request]
        if not running and not self._local:
            return
        self._began = now
        self._step_s = speed.step(len(running), self._context)
        self._growth = speed.context_token_s * len(running)
        if self._local:
            self._compute_prompts(speed.max_num_batched_tokens - len(running))
            self._schedule(1)
        else:
            self._schedule(running[0][0] - self._step)
        if self._joining:
            for request in self._joining:
                self._listener.first_token(now + self._step_s, request)
            self._joining = []

    def _compute_prompts(self, room: int) -> None:
        """Add prompt tokens to the step, up to `room` tokens."""
        speed, local = self._speed, self._local
        while local and room > 0:
            prompt = self._prompts[local[0]]
            part = min(prompt - self._computed, room)
            attended = part * (self._computed + part / 2)
            self._step_s += speed.prompt_token_s * part + speed.prompt_token_context_s * attended
            room -= part
            self._computed += part
            if self._computed == prompt:
                self._finishing.append(local.popleft())
                self._computed = 0

    def _end(self, now: float, plan: int) -> None:
        if plan != self._plan:
            return
        running, steps = self._running, self._steps
        self._report_gaps(steps)
        self._busy_s, self._sequence_s = self.busy_s(now)
        self._steps = 0
        self._step += steps
        self._context += steps * len(running)
        while running and running[0][0] == self._step:
            self._leave(now, heapq.heappop(running)[1])
        finishing, self._finishing = self._finishing, []
        for request in finishing:
            self._listener.first_token(now, request)
            self._context += self._prompts[request] + 1
            if self._outputs[request] == 1:
                self._leave(now, request)
            else:
                heapq.heappush(running, (self._step + self._outputs[request] - 1, request))
        self._admit(now)
        self._begin(now, 0)

    def _report_gaps(self, steps: int) -> None:
        """Every sequence has one gap per step, except for the first token of those that joined."""
        sequences, last = len(self._running), self._step_s + (steps - 1) * self._growth
        if self._gap_count == sequences:
            if sequences:
                self._listener.gaps(self._step_s, last, steps * sequences)
            return
        if self._gap_count:
            self._listener.gaps(self._step_s, self._step_s, self._gap_count)
        if steps > 1:
            self._listener.gaps(self._step_s + self._growth, last, (steps - 1) * sequences)

    def _leave(self, now: float, request: int) -> None:
        tokens = self._prompts[request] + self._outputs[request]
        self._context -= tokens
        self._kv_used -= tokens
        self._admitted -= 1
        self._listener.last_token(now, request)
