"""One connector under vLLM's own model runner code, and under ours, over the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from unit.connector.spy import Broken, Metadata, Spy, WorkerMetadata
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from disagg.connector.model_runner import Lifecycle, LifecycleV2
from disagg.vllm_compat.differences import (
    CALLER_NAMES_LOAD_ARGUMENTS,
    NO_FINISH_FORWARD,
    NO_LOAD_ARGUMENTS,
    RESULTS_AS_SETS,
    RESULTS_BEFORE_DRAFTS,
)
from disagg.vllm_compat.transfers import KVConnectorTransferResults


@dataclass(frozen=True)
class Plan:
    """One step: what the scheduler says, what the connector answers, whether the model breaks.

    tokens: 0 for a step without a forward pass. draft: a draft model follows.
    """

    name: str = "step"
    tokens: int = 3
    sync: bool = False
    draft: bool = False
    breaks: bool = False
    finished: frozenset[str] = frozenset()
    preempted: frozenset[str] = frozenset()
    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    invalid: frozenset[int] = frozenset()
    reports: bool = False
    """Whether there are statistics, events and worker metadata."""

    def scheduler_output(self) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = self.tokens
        output.num_scheduled_tokens = {"request": self.tokens} if self.tokens else {}
        output.finished_req_ids = set(self.finished)
        output.preempted_req_ids = set(self.preempted)
        output.has_sync_kv_loads = self.sync
        output.kv_connector_metadata = Metadata(self.name)
        return output

    def instruct(self, spy: Spy) -> None:
        """Fresh objects each time, as a connector's are."""
        spy.answers.get_transfer_results = KVConnectorTransferResults(
            set(self.sent), set(self.received), set(self.failed)
        )
        spy.answers.get_finished = (set(self.sent), set(self.received))
        spy.answers.get_block_ids_with_load_errors = set(self.invalid)
        reports = self.reports
        spy.answers.get_kv_connector_stats = (
            KVConnectorStats(data={"of": self.name}) if reports else None
        )
        spy.answers.get_kv_connector_kv_cache_events = ("events", self.name) if reports else None
        spy.answers.build_connector_worker_meta = WorkerMetadata(self.name) if reports else None

    def write_blocks(self, spy: Spy) -> None:
        """What the runner does to blocks before the forward pass: it zeroes and copies some."""
        spy.note("write blocks")

    def forward(self, spy: Spy) -> None:
        spy.note("forward")
        if self.breaks:
            raise Broken("forward")


class Runner(Protocol):
    """Runs one step; the output is None where it was lost with an exception."""

    def __call__(self, spy: Spy, plan: Plan) -> KVConnectorOutput | None: ...


@contextmanager
def transfer_group(spy: Spy) -> Iterator[None]:
    """vLLM's global, for as long as vLLM's own code runs."""
    kv_transfer_state._KV_CONNECTOR_AGENT = spy
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None


@dataclass
class Mixin:
    """vLLM's `KVConnectorModelRunnerMixin`, in the order of `GPUModelRunner.execute_model`."""

    config: VllmConfig
    lost: KVConnectorOutput | None = None
    """The output of a step that broke: the runner's variable, which ends with the engine."""

    def __call__(self, spy: Spy, plan: Plan) -> KVConnectorOutput | None:
        scheduled, mixin = plan.scheduler_output(), KVConnectorModelRunnerMixin
        with transfer_group(spy):
            metadata = scheduled.kv_connector_metadata
            assert metadata is not None
            spy.handle_preemptions(metadata)
            plan.write_blocks(spy)
            if not plan.tokens:
                answer = mixin.kv_connector_no_forward(scheduled, self.config)
                return answer.kv_connector_output or KVConnectorOutput(set(), set())
            with (
                set_forward_context(None, self.config),
                mixin.maybe_get_kv_connector_output(scheduled, plan.draft) as output,
            ):
                self.lost = output
                plan.forward(spy)
            if plan.draft:
                spy.note("draft")
                mixin.finalize_kv_connector()
            return output


@dataclass
class Second:
    """vLLM's `ActiveKVConnector`, in the order of the second `GPUModelRunner`."""

    config: VllmConfig
    made: dict[int, ActiveKVConnector] = field(default_factory=dict)

    def __call__(self, spy: Spy, plan: Plan) -> KVConnectorOutput | None:
        with transfer_group(spy):
            if id(spy) not in self.made:
                self.made[id(spy)] = ActiveKVConnector(self.config, {})
                spy.calls.clear()
            runner, scheduled = self.made[id(spy)], plan.scheduler_output()
            plan.write_blocks(spy)
            if not plan.tokens:
                answer = runner.no_forward(scheduled)
                return answer.kv_connector_output or _nothing()
            with set_forward_context(None, self.config):
                _pre_forward(runner, scheduled)
                plan.forward(spy)
            if not NO_FINISH_FORWARD.here:
                runner.finish_forward()
            if plan.draft and RESULTS_BEFORE_DRAFTS.here:
                return self._before_drafts(runner, spy, scheduled)
            if plan.draft:
                spy.note("draft")
            return runner.post_forward(scheduled.finished_req_ids)

    def _before_drafts(
        self, runner: Any, spy: Spy, scheduled: SchedulerOutput
    ) -> KVConnectorOutput | None:
        output: KVConnectorOutput | None
        output = runner.post_forward(scheduled.finished_req_ids, defer_finalize=True)
        spy.note("draft")
        runner.finalize_step()
        return output


def _nothing() -> KVConnectorOutput:
    """What stands for the output that vLLM leaves out of a step with nothing to report."""
    return KVConnectorOutput(set(), set()) if RESULTS_AS_SETS.here else KVConnectorOutput()


def _pre_forward(runner: Any, scheduled: SchedulerOutput) -> None:
    """As the model runner of this vLLM calls it."""
    if NO_LOAD_ARGUMENTS.here:
        runner.pre_forward(scheduled)
    elif CALLER_NAMES_LOAD_ARGUMENTS.here:
        runner.pre_forward(scheduled, **_load_kwargs(scheduled))
    else:
        runner.pre_forward(scheduled, SimpleNamespace(**BATCH))


def _load_kwargs(scheduled: SchedulerOutput) -> dict[str, Any]:
    """The arguments that the second model runner passes to `start_load_kv`."""
    if NO_LOAD_ARGUMENTS.here:
        return {}
    renamed = {"idx_mapping": "request_state_indices", "req_ids": "request_ids"}
    batch = {renamed.get(name, name): value for name, value in BATCH.items()}
    if CALLER_NAMES_LOAD_ARGUMENTS.here:
        return batch
    return {"scheduler_output": scheduled, **batch}


BATCH: dict[str, Any] = {"idx_mapping": "mapping", "req_ids": "ids", "num_tokens": 3}


@dataclass
class Ours:
    """Our lifecycle over the same plan."""

    config: VllmConfig
    make: Callable[[Spy, VllmConfig], Lifecycle] = Lifecycle
    made: dict[int, Lifecycle] = field(default_factory=dict)
    lost: KVConnectorOutput | None = None

    def __call__(self, spy: Spy, plan: Plan) -> KVConnectorOutput | None:
        lifecycle = self.made.setdefault(id(spy), self.make(spy, self.config))
        scheduled = plan.scheduler_output()
        write_blocks = partial(plan.write_blocks, spy)
        if not plan.tokens:
            return lifecycle.idle_step(scheduled, write_blocks=write_blocks)
        with lifecycle.step(
            scheduled,
            load_kwargs=self._load_kwargs(scheduled),
            defer_finalize=plan.draft,
            write_blocks=write_blocks,
        ) as step:
            self.lost = step.output
            plan.forward(spy)
        if plan.draft:
            spy.note("draft")
            assert lifecycle.finalize() is step.output
        return step.output

    def _load_kwargs(self, scheduled: SchedulerOutput) -> dict[str, Any]:
        return _load_kwargs(scheduled) if self.make is LifecycleV2 else {}
