"""Our lifecycle makes the calls that vLLM's own model runners make, and returns what they return.

A spy connector writes the calls down, under vLLM's real code and under ours.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.connector.runners import Mixin, Ours, Plan, Runner, Second, transfer_group
from unit.connector.spy import Broken, Call, Spy, spy_config
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.forward_context import (
    get_forward_context,
    is_forward_context_available,
    set_forward_context,
)
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from disagg.connector.model_runner import Lifecycle, LifecycleV2
from disagg.vllm_compat.differences import (
    NO_FINISH_FORWARD,
    RESULTS_AS_SETS,
    RESULTS_BEFORE_DRAFTS,
)

CONFIG = spy_config()
RESULTS: dict[str, Any] = {
    "sent": frozenset({"a"}),
    "received": frozenset({"b", "c"}),
    "failed": frozenset({"c"}),
}
PLANS = {
    "a forward pass": Plan(),
    "loads before the forward": Plan(sync=True),
    "results": Plan(finished=frozenset({"a", "b"}), **RESULTS),
    "invalid blocks": Plan(invalid=frozenset({3, 7})),
    "statistics, events, worker metadata": Plan(reports=True),
    "preempted": Plan(preempted=frozenset({"p"})),
    "no forward": Plan(tokens=0),
    "no forward, with results": Plan(tokens=0, reports=True, **RESULTS),
    "no forward, sync": Plan(tokens=0, sync=True),
    "a draft model": Plan(draft=True),
    "a draft model, sync, results": Plan(draft=True, sync=True, reports=True, **RESULTS),
}
BREAKS = {
    "the forward raises": Plan(breaks=True),
    "the forward raises after sync loads": Plan(breaks=True, sync=True),
    "the forward raises, with results": Plan(breaks=True, reports=True, **RESULTS),
}

ids = st.frozensets(st.sampled_from(["a", "b", "c", "d"]), max_size=3)
plans = st.builds(
    Plan,
    name=st.sampled_from(["one", "two", "three"]),
    tokens=st.sampled_from([0, 1, 5]),
    sync=st.booleans(),
    draft=st.booleans(),
    finished=ids,
    preempted=ids,
    sent=ids,
    received=ids,
    failed=ids,
    invalid=st.frozensets(st.integers(0, 9), max_size=3),
    reports=st.booleans(),
)
Trace = tuple[list[Call], list[KVConnectorOutput | None]]


def trace(runner: Runner, steps: Sequence[Plan]) -> Trace:
    """All calls of these steps, and each step's output."""
    spy, outputs = Spy(CONFIG), list[KVConnectorOutput | None]()
    for plan in steps:
        plan.instruct(spy)
        outputs.append(runner(spy, plan))
    return spy.calls, outputs


def broken(runner: Mixin | Ours, plan: Plan) -> Trace:
    """The same of one step whose forward pass raises."""
    spy = Spy(CONFIG)
    plan.instruct(spy)
    with pytest.raises(Broken, match="forward"):
        runner(spy, plan)
    return spy.calls, [runner.lost]


# ---- as vLLM's first runner ------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_as_the_mixin(plan: Plan) -> None:
    calls, outputs = trace(Mixin(CONFIG), [plan])
    assert trace(Ours(CONFIG), [plan]) == (calls, outputs)
    assert [call.name for call in calls].count("start_load_kv") == 1
    assert calls[-1].name == "clear_connector_metadata"


@pytest.mark.parametrize("plan", BREAKS.values(), ids=BREAKS)
def test_as_the_mixin_when_the_forward_raises(plan: Plan) -> None:
    calls, outputs = broken(Mixin(CONFIG), plan)
    assert broken(Ours(CONFIG), plan) == (calls, outputs)
    assert calls[-1].name == "clear_connector_metadata"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(plans, max_size=6))
def test_as_the_mixin_over_any_steps(steps: list[Plan]) -> None:
    assert trace(Ours(CONFIG), steps) == trace(Mixin(CONFIG), steps)


# ---- as vLLM's second runner -----------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_as_the_second_runner(plan: Plan) -> None:
    theirs = trace(Second(CONFIG), [plan])
    assert trace(Ours(CONFIG, LifecycleV2), [plan]) == theirs
    told = 0 if NO_FINISH_FORWARD.here else 1
    assert [call.name for call in theirs[0]].count("finish_forward") == told


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(plans, max_size=6))
def test_as_the_second_runner_over_any_steps(steps: list[Plan]) -> None:
    assert trace(Ours(CONFIG, LifecycleV2), steps) == trace(Second(CONFIG), steps)


def test_registers_as_the_second_runner() -> None:
    caches = {"layer.0": torch.zeros(2, 1, 4, 8)}
    theirs, ours = Spy(CONFIG), Spy(CONFIG)
    with transfer_group(theirs):
        ActiveKVConnector(CONFIG, caches)
    Lifecycle(ours, CONFIG).register(caches)
    # The worker asks for this one later, for the engine core.
    assert ours.calls.pop().name == "get_handshake_metadata"
    assert ours.calls == theirs.calls


# ---- what the drivers of these tests take for granted ------------------------------------------

WRITES = ["_zero_block_ids", "copy_kv_cache_blocks_inplace"]


def calls_in(function: Any, *names: str) -> list[str]:
    """The calls of these names in a function's source, in their order there."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [
        (call.lineno, call.col_offset, getattr(call, "attr", getattr(call, "id", "")))
        for call in calls
        if isinstance(call, ast.Attribute | ast.Name)
    ]
    return [name for _, _, name in sorted(named) if name in names]


def test_the_first_runner_writes_blocks_after_it_handled_preemptions() -> None:
    assert calls_in(
        GPUModelRunner.execute_model,
        "handle_preemptions",
        "_update_states",
        "kv_connector_no_forward",
        "preprocess_mamba",
        "maybe_get_kv_connector_output",
    ) == [
        "handle_preemptions",
        "_update_states",
        "kv_connector_no_forward",
        "preprocess_mamba",
        "maybe_get_kv_connector_output",
    ]
    assert calls_in(GPUModelRunner._update_states, *WRITES) == WRITES


def test_the_second_runner_writes_blocks_before_it_handles_preemptions() -> None:
    """`no_forward` and `pre_forward` are vLLM's own in `Second`, and call `handle_preemptions`."""
    expected = ["update_requests", "no_forward", "preprocess_state", "pre_forward"]
    if not NO_FINISH_FORWARD.here:
        expected.append("finish_forward")
    order = calls_in(SecondRunner.execute_model, *expected)
    assert list(dict.fromkeys(order)) == expected
    writes = ["zero_block_ids", "copy_kv_cache_blocks_inplace"]
    assert calls_in(SecondRunner.update_requests, *writes) == writes
    # Nothing of a step writes blocks after this.
    last = "finalize_step" if RESULTS_BEFORE_DRAFTS.here else "post_forward"
    sampled = calls_in(SecondRunner.sample_tokens, "postprocess_sampled", "propose", last)
    assert sampled[-1] == last


def test_vllm_finalises_after_drafting() -> None:
    source = inspect.getsource(GPUModelRunner.sample_tokens)
    assert source.rindex("propose_draft_token_ids(") < source.index("finalize_kv_connector()")


# ---- where vLLM lets the engine end ------------------------------------------------------------


def cleared(spy: Spy) -> bool:
    return not spy.has_connector_metadata()


def scheduled() -> SchedulerOutput:
    return Plan().scheduler_output()


@pytest.mark.parametrize("make", [Lifecycle, LifecycleV2])
def test_a_draft_that_never_runs_leaves_nothing_to_finalise(make: type[Lifecycle]) -> None:
    plan = Plan(draft=True, breaks=True, reports=True, received=frozenset({"b"}))
    calls, (output,) = broken(Ours(CONFIG, make), plan)
    alone, (same,) = broken(
        Ours(CONFIG, make), Plan(breaks=True, reports=True, received=plan.received)
    )
    assert (calls, output) == (alone, same)
    assert output is not None
    assert output.finished_recving == {"b"}
    assert calls[-1].name == "clear_connector_metadata"


def test_the_mixin_leaves_the_metadata_of_a_draft_that_never_runs() -> None:
    calls, _ = broken(Mixin(CONFIG), Plan(draft=True, breaks=True))
    assert "clear_connector_metadata" not in [call.name for call in calls]


@pytest.mark.parametrize("make", [Lifecycle, LifecycleV2])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    "method",
    [
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_save",
        "get_finished" if RESULTS_AS_SETS.here else "get_transfer_results",
        "get_block_ids_with_load_errors",
        "get_kv_connector_stats",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
    ],
)
@pytest.mark.parametrize("sync", [False, True])
def test_whatever_the_connector_raises(
    make: type[Lifecycle], draft: bool, method: str, sync: bool
) -> None:
    spy = Spy(CONFIG)
    runner = Ours(CONFIG, make)
    plan = Plan(sync=sync, draft=draft, received=frozenset({"b"}), reports=True)
    plan.instruct(spy)
    spy.raises = {method}
    with pytest.raises(Broken, match=method):
        runner(spy, plan)
    assert cleared(spy)
    names = [call.name for call in spy.calls]
    if "get_block_ids_with_load_errors" in names:
        assert runner.lost is not None
        assert runner.lost.finished_recving == {"b"}
    spy.raises = set()
    spy.calls.clear()
    output = runner(spy, plan)
    assert output is not None
    assert output.finished_recving == {"b"}
    assert (spy.calls, [output]) == trace(Ours(CONFIG, make), [plan])


@pytest.mark.parametrize("make", [Lifecycle, LifecycleV2])
def test_writing_blocks_may_raise(make: type[Lifecycle]) -> None:
    def write_blocks() -> None:
        raise Broken("write blocks")

    spy = Spy(CONFIG)
    lifecycle = make(spy, CONFIG)
    with pytest.raises(Broken, match="write blocks"):
        lifecycle.idle_step(scheduled(), write_blocks=write_blocks)
    assert cleared(spy)
    lifecycle.idle_step(scheduled())


@pytest.mark.parametrize("make", [Lifecycle, LifecycleV2])
def test_steps_follow_each_other(make: type[Lifecycle]) -> None:
    spy = Spy(CONFIG)
    lifecycle = make(spy, CONFIG)
    with lifecycle.step(scheduled(), defer_finalize=True), pytest.raises(RuntimeError):
        lifecycle.idle_step(scheduled())
    with pytest.raises(RuntimeError, match="has not ended"):
        lifecycle.idle_step(scheduled())
    lifecycle.finalize()
    with pytest.raises(RuntimeError, match="no step"):
        lifecycle.finalize()
    lifecycle.idle_step(scheduled())
    assert cleared(spy)


def test_a_step_needs_metadata() -> None:
    spy, output = Spy(CONFIG), scheduled()
    output.kv_connector_metadata = None
    lifecycle = Lifecycle(spy, CONFIG)
    with pytest.raises(ValueError, match="kv_connector_metadata"):
        lifecycle.idle_step(output)
    assert spy.calls == []
    lifecycle.idle_step(scheduled())


# ---- its surroundings --------------------------------------------------------------------------


def test_needs_no_transfer_group_and_leaves_no_forward_context() -> None:
    spy = Spy(CONFIG)
    lifecycle = Lifecycle(spy, CONFIG)
    with lifecycle.step(scheduled(), attn_metadata="ours"):
        assert str(get_forward_context().attn_metadata) == "ours"
        assert not has_kv_transfer_group()
    assert not is_forward_context_available()


def test_keeps_the_forward_context_it_finds() -> None:
    spy = Spy(CONFIG)
    with set_forward_context("theirs", CONFIG), Lifecycle(spy, CONFIG).step(scheduled()):
        assert str(get_forward_context().attn_metadata) == "theirs"
    assert Call("start_load_kv", ("forward context, attn_metadata 'theirs'",), "step") in spy.calls


def test_shutdown_ends_the_connector() -> None:
    spy = Spy(CONFIG)
    lifecycle = Lifecycle(spy, CONFIG)
    with lifecycle.step(scheduled(), defer_finalize=True):
        pass
    lifecycle.shutdown()
    assert spy.calls[-1].name == "shutdown"
    with pytest.raises(RuntimeError):
        lifecycle.finalize()


def metadata_of(step: SchedulerOutput) -> KVConnectorMetadata:
    assert step.kv_connector_metadata is not None
    return step.kv_connector_metadata


def in_vllms_decorator(spy: Spy, kv_layer: torch.Tensor, metadata: Any, bound: bool) -> None:
    @maybe_transfer_kv_layer
    def attend(layer_name: str) -> None:
        spy.note("attention")

    layers = CONFIG.compilation_config.static_forward_context
    layers["layer.0"] = SimpleNamespace(kv_cache=kv_layer)
    by_layer = metadata and {"layer.0": metadata}
    try:
        with transfer_group(spy), set_forward_context(by_layer, CONFIG):
            if bound:
                spy.bind_connector_metadata(metadata_of(scheduled()))
            attend("layer.0")
    finally:
        layers.clear()


def in_our_hook(spy: Spy, kv_layer: torch.Tensor, metadata: Any, bound: bool) -> None:
    if bound:
        spy.bind_connector_metadata(metadata_of(scheduled()))
    with Lifecycle(spy, CONFIG).layer("layer.0", kv_layer, metadata):
        spy.note("attention")


@pytest.mark.parametrize("metadata", [None, "metadata"])
@pytest.mark.parametrize("bound", [False, True])
def test_layers_as_vllms_attention(metadata: str | None, bound: bool) -> None:
    theirs, ours, kv_layer = Spy(CONFIG), Spy(CONFIG), torch.zeros(2, 1, 4, 8)
    in_vllms_decorator(theirs, kv_layer, metadata, bound)
    in_our_hook(ours, kv_layer, metadata, bound)
    assert ours.calls == theirs.calls
    assert ("save_kv_layer" in [call.name for call in ours.calls]) == bool(metadata and bound)
