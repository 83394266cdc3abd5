"""The connector calls that vLLM's model runner makes around a forward pass, without a model.

    lifecycle = Lifecycle(connector, vllm_config)
    lifecycle.register(kv_caches)
    with lifecycle.step(scheduler_output) as step:
        ...                                         # the forward pass
    scheduler.update_from_output(scheduler_output, model_runner_output(step.output))
    lifecycle.idle_step(scheduler_output)           # a step without tokens

The connector is passed in: vLLM's global KV transfer group is neither read nor set, so any number
of connectors live in one process. `Lifecycle` makes the calls of `KVConnectorModelRunnerMixin`
in their order, `LifecycleV2` those of the second model runner. The first runner zeroes and copies
blocks after `handle_preemptions`, the second one before it (`write_blocks`). Where a forward pass
or the connector itself raises, vLLM ends the engine; here the metadata is cleared, collected
results stay in `step.output`, and the next step begins normally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.forward_context import (
    get_forward_context,
    is_forward_context_available,
    set_forward_context,
)
from vllm.v1.outputs import KVConnectorOutput

from disagg.vllm_compat import transfers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
    )
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class Step:
    """One step. `output` is empty until its block ends; before vLLM 0.33, with `LifecycleV2` and a
    deferred finalisation, until `finalize`."""

    scheduler_output: SchedulerOutput
    load_kwargs: Mapping[str, Any]
    output: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    loads_started: bool = False
    idle: bool = False
    """Whether it has no forward pass."""


class Lifecycle:
    """Drives the worker half of one connector, as vLLM's model runner mixin does.

    Not for several threads: steps follow each other.
    """

    def __init__(self, connector: KVConnectorBase_V1, vllm_config: VllmConfig) -> None:
        self.connector = connector
        self._vllm_config = vllm_config
        self._open: Step | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> KVConnectorHandshakeMetadata | None:
        """Give the connector each layer's cache, once, before the first step.

        kv_caches: by layer name, logical [B, H, N, C] of any strides. Returns the metadata to pass
        to the scheduler half's `set_xfer_handshake_metadata_pp_aware`, as vLLM's engine core does.
        """
        self.connector.register_kv_caches(kv_caches)
        self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)
        return self.connector.get_handshake_metadata()

    @contextmanager
    def step(
        self,
        scheduler_output: SchedulerOutput,
        *,
        attn_metadata: Any = None,
        load_kwargs: Mapping[str, Any] | None = None,
        defer_finalize: bool = False,
        write_blocks: Callable[[], None] | None = None,
        idle: bool = False,
    ) -> Iterator[Step]:
        """Around one forward pass: the block launches it.

        `write_blocks` does what the runner does to blocks before the forward pass: it zeroes
        `new_block_ids_to_zero`, makes the `kv_cache_block_copies`, and copies recurrent state into
        new blocks. It runs where the runner does this, before or after `handle_preemptions`.

        Loads start before the block if the step has synchronous ones, and after it otherwise.
        A forward context is entered unless there is one. `load_kwargs` go to `start_load_kv`.
        `idle`: vLLM may leave out `wait_for_save`, as there is no forward pass.
        With `defer_finalize`, `finalize` must follow, after the draft model's forward pass.

        Raises `RuntimeError` while another step is open; passes on what the block and the
        connector raise, after clearing the metadata, and then nothing is left to finalise.
        """
        if self._open is not None:
            raise RuntimeError("the last step has not ended: its `finalize` did not follow")
        metadata = scheduler_output.kv_connector_metadata
        if metadata is None:
            raise ValueError("scheduler_output has no kv_connector_metadata")
        self._open = step = Step(scheduler_output, load_kwargs or {}, idle=idle)
        deferred = False
        try:
            with self._forward_context(attn_metadata):
                self._before_forward(metadata, write_blocks or _write_nothing)
                self.connector.bind_connector_metadata(metadata)
                if scheduler_output.has_sync_kv_loads:
                    self._start_loads(step)
                launched = False
                try:
                    yield step
                    launched = True
                finally:
                    self._after_forward(step, defer=defer_finalize and launched)
            deferred = defer_finalize
        finally:
            if not deferred:
                self._close()

    def idle_step(
        self,
        scheduler_output: SchedulerOutput,
        *,
        write_blocks: Callable[[], None] | None = None,
    ) -> KVConnectorOutput:
        """A step without a forward pass: transfers go on, and are reported."""
        with self.step(scheduler_output, write_blocks=write_blocks, idle=True) as step:
            pass
        return step.output

    def finalize(self) -> KVConnectorOutput:
        """End a step whose finalisation was deferred. Raises `RuntimeError` if there is none."""
        if self._open is None:
            raise RuntimeError("no step is waiting to be finalised")
        step = self._open
        try:
            self._finalize(step)
        finally:
            self._close()
        return step.output

    @contextmanager
    def layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any) -> Iterator[None]:
        """Around one attention layer inside a step: wait for its load, then save it.

        kv_layer: [B, H, N, C]. Nothing is called without attention metadata or outside of a step.
        """
        if attn_metadata is None or not self.connector.has_connector_metadata():
            yield
            return
        self.connector.wait_for_layer_load(layer_name)
        yield
        self.connector.save_kv_layer(layer_name, kv_layer, attn_metadata)

    def shutdown(self) -> None:
        """End the connector. A step that is still open is dropped."""
        self._open = None
        self.connector.shutdown()  # type: ignore[no-untyped-call]

    # ---- the parts in which vLLM's two runners differ ---------------------------------------

    def _before_forward(
        self, metadata: KVConnectorMetadata, write_blocks: Callable[[], None]
    ) -> None:
        self.connector.handle_preemptions(metadata)
        write_blocks()

    def _after_forward(self, step: Step, *, defer: bool) -> None:
        self._start_loads(step)
        if not defer:
            self._wait_for_save(step)
        self._collect(step)

    def _finalize(self, step: Step) -> None:
        self._wait_for_save(step)

    # ---- what they share ------------------------------------------------------------------

    def _start_loads(self, step: Step) -> None:
        if not step.loads_started:
            step.loads_started = True
            self.connector.start_load_kv(get_forward_context(), **step.load_kwargs)

    def _wait_for_save(self, step: Step) -> None:
        if not step.idle or transfers.saves_in_idle_steps():
            self.connector.wait_for_save()  # type: ignore[no-untyped-call]

    def _collect(self, step: Step) -> None:
        """In place, so that what was taken from the connector is never lost with an exception."""
        output, connector = step.output, self.connector
        results = transfers.results_of(connector, step.scheduler_output.finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()

    def _close(self) -> None:
        self._open = None
        self.connector.clear_connector_metadata()

    def _forward_context(self, attn_metadata: Any) -> AbstractContextManager[None]:
        if is_forward_context_available():
            return nullcontext()
        context: AbstractContextManager[None] = set_forward_context(
            attn_metadata, self._vllm_config
        )
        return context


class LifecycleV2(Lifecycle):
    """The same around vLLM's second model runner (`VllmConfig.use_v2_model_runner`).

    It zeroes and copies blocks before it calls `handle_preemptions`. It calls `finish_forward` once
    the forward pass was launched. Where a draft model follows, it defers `wait_for_save`; before
    vLLM 0.33 everything: loads, results and all.
    """

    def _before_forward(
        self, metadata: KVConnectorMetadata, write_blocks: Callable[[], None]
    ) -> None:
        write_blocks()
        self.connector.handle_preemptions(metadata)

    def _after_forward(self, step: Step, *, defer: bool) -> None:
        transfers.finish_forward(self.connector)
        if not defer or transfers.takes_results_before_drafts():
            self._collect_all(step, saves=not defer)

    def _finalize(self, step: Step) -> None:
        if transfers.takes_results_before_drafts():
            self._wait_for_save(step)
        else:
            self._collect_all(step, saves=True)

    def _collect_all(self, step: Step, *, saves: bool) -> None:
        with self._forward_context(None):
            self._start_loads(step)
        if saves:
            self._wait_for_save(step)
        self._collect(step)
        # The second runner reports None where the first reports an empty set.
        step.output.finished_sending = transfers.reported(step.output.finished_sending or set())
        step.output.finished_recving = transfers.reported(step.output.finished_recving or set())


def _write_nothing() -> None:
    """A step whose runner neither zeroes nor copies blocks."""
