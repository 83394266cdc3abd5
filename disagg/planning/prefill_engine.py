"""A prefill engine in the simulation: one step at a time, prompts in the order of arrival.

It works as vLLM's scheduler with chunked prefill: a step takes prompts up to
`max_num_batched_tokens`, and a part of the last prompt if it does not fit. Prefix caches and the
size of the KV cache are not modelled: see `report.NOT_MODELLED`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from disagg.planning.events import Clock, EventCallback
from disagg.planning.speeds import PrefillSpeed


class PrefillEngine:
    """Calls `begins(time, request)` when a prompt's first step begins, and `done(time, request)`
    when the prompt is computed."""

    __slots__ = (
        "_began",
        "_begins",
        "_busy_s",
        "_clock",
        "_computed",
        "_computing",
        "_done",
        "_finishing",
        "_prompts",
        "_queue",
        "_speed",
    )

    def __init__(
        self,
        speed: PrefillSpeed,
        prompts: Sequence[int],
        clock: Clock,
        begins: EventCallback,
        done: EventCallback,
    ) -> None:
        self._speed, self._prompts, self._clock = speed, prompts, clock
        self._begins, self._done = begins, done
        self._queue: deque[int] = deque()
        self._computed = 0  # tokens of the queue's first prompt that are computed
        self._computing = False
        self._finishing: list[int] = []
        self._began = self._busy_s = 0.0

    def add(self, now: float, request: int) -> None:
        """A prompt arrives."""
        self._queue.append(request)
        if not self._computing:
            self._computing, self._began = True, now
            self._clock.at(now, self._begin, 0)  # together with other arrivals of this moment

    def busy_s(self, now: float) -> float:
        """Seconds so far in which it ran steps."""
        return self._busy_s + (now - self._began if self._computing else 0.0)

    def _begin(self, now: float, _: int) -> None:
        speed, queue, prompts = self._speed, self._queue, self._prompts
        room = speed.max_num_batched_tokens
        steps, tokens, attended = 1, 0, 0.0
        if not self._computed:
            self._begins(now, queue[0])
        left = prompts[queue[0]] - self._computed
        if left > room:
            # The first prompt fills these steps alone, whatever arrives meanwhile: one event.
            steps = (left - 1) // room
            tokens = steps * room
            attended = tokens * (self._computed + tokens / 2)
            self._computed += tokens
        else:
            finishing = self._finishing
            while queue and room and len(finishing) < speed.max_num_seqs:
                prompt = prompts[queue[0]]
                if finishing:  # the step's first prompt was told above
                    self._begins(now, queue[0])
                part = min(prompt - self._computed, room)
                attended += part * (self._computed + part / 2)
                tokens += part
                room -= part
                self._computed += part
                if self._computed == prompt:
                    finishing.append(queue.popleft())
                    self._computed = 0
        duration = steps * speed.step_s + speed.token_s * tokens + speed.token_context_s * attended
        self._computing, self._began = True, now
        self._clock.at(now + duration, self._end, 0)

    def _end(self, now: float, _: int) -> None:
        self._computing = False
        self._busy_s += now - self._began
        finished, self._finishing = self._finishing, []
        for request in finished:
            self._done(now, request)
        if self._queue:
            self._begin(now, 0)
