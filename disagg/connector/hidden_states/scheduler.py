"""The scheduler half: which requests' states will be written, and which blocks they are in.

Runs inside vLLM's scheduler, so it never waits and never does I/O. A request gets its number when
it is first scheduled, and its answer contains the path when it has finished. An aborted request
has no answer, so its states are not written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from disagg.connector.hidden_states import naming
from disagg.connector.hidden_states.messages import StepWork, WriterAddress
from disagg.connector.hidden_states.writer import Save
from disagg.connector.kv_cache_layout import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_NO_TOKEN = -1
_ANSWERED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class SchedulerHalf:
    """Scheduler side of `HiddenStatesConnector`."""

    def __init__(self, group: int, block_size: int) -> None:
        """group: which KV cache group holds the states. block_size: tokens of its blocks."""
        self._group, self._block_size = group, block_size
        self._writer: WriterAddress | None = None
        self._next_number = 1
        self._numbers: dict[str, int] = {}
        self._work = StepWork()

    def set_writer(self, writer: WriterAddress) -> None:
        """The writing worker's life and folder."""
        self._writer = writer

    def step_work(self, output: SchedulerOutput) -> StepWork:
        """The worker's work of this step; each item is returned once."""
        work, self._work = self._work, StepWork()
        for request in output.scheduled_new_reqs:
            if request.req_id not in self._numbers:  # it is new again after a preemption
                self._numbers[request.req_id] = self._next_number
                work.promises.append(self._next_number)
                self._next_number += 1
        return work

    def request_finished(
        self, request: Request, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether to keep the blocks until they were read, and the answer's params."""
        number = self._numbers.pop(request.request_id, None)
        if number is None:
            return False, None  # it was never scheduled
        if request.status not in _ANSWERED:
            self._work.withdrawals.append(number)
            return False, None
        assert self._writer is not None
        name = naming.file_name(request.request_id, self._writer.life, number)
        path = os.path.join(self._writer.folder, name)
        tokens = _tokens(request)
        ids = block_ids[self._group] if self._group < len(block_ids) else []
        ids = ids[: math.ceil(len(tokens) / self._block_size)]
        problem = self._problem(request, len(tokens), ids)
        held = ids if problem is None else []
        self._work.saves.append(Save(request.request_id, path, tokens, held, problem))
        return bool(held), {"hidden_states_path": path}

    def _problem(self, request: Request, num_tokens: int, ids: list[int]) -> str | None:
        """Why the blocks do not hold all these tokens' states; None if they do."""
        computed = min(request.num_computed_tokens, len(ids) * self._block_size)
        if computed < num_tokens:
            return f"only {computed} of {num_tokens} tokens are in the engine's cache"
        if NULL_BLOCK in ids:
            return "the engine's cache freed some of the prompt's blocks while it ran"
        return None


def _tokens(request: Request) -> list[int]:
    """The tokens whose states are written: the prompt's, and on request the answer's."""
    params = request.kv_transfer_params
    if isinstance(params, dict) and params.get("include_output_tokens") is True:
        # The last token was never an input of a forward pass.
        return list(request.all_token_ids)[:-1]
    if request.prompt_token_ids is None:
        return [_NO_TOKEN] * request.num_prompt_tokens  # a prompt of embeddings
    return list(request.prompt_token_ids)
