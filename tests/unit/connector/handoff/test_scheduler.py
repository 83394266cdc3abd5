"""The scheduler half: what of vLLM's calls comes to its two parts."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from unit.connector.handoff.test_block_digests import BLOCK, LENGTH, request
from unit.connector.handoff.test_consumer_scheduler import FACTS, HOSTS
from unit.connector.handoff.test_producer_scheduler import ATTENTION, PREFILL, SECRET, prefill
from vllm.v1.outputs import KVConnectorOutput

from disagg.connector.handoff import kv_transfer_params
from disagg.connector.handoff.messages import BegunReport, LeaseReport, StepReport
from disagg.connector.handoff.scheduler import SchedulerHalf
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.connector.handoff.stall import PATIENCE_S, StallWatch
from disagg.transport.control.ticket import Invitation, sign


class Scheduler:
    """A half with a clock and a pool of its own."""

    def __init__(self, *, produces: bool = True, consumes: bool = True, **facts: Any) -> None:
        self.now, self.has_room = 5.0, False
        engine = replace(FACTS, **facts)
        self.half = SchedulerHalf(
            engine, ConnectorSettings(), SECRET, produces=produces, consumes=consumes
        )
        self.half.set_workers(HOSTS, [2])
        self.half.watch(StallWatch("engine", lambda: self.has_room, lambda: self.now))

    def arrives(self, name: str) -> None:
        asked = request()
        asked.request_id = name
        self.half.on_new_request(asked)

    def prefilled(self, name: str) -> None:
        """A prefill that keeps its blocks."""
        asked = prefill(name)
        self.half.on_new_request(asked)
        assert self.half.request_finished(asked, [ATTENTION])[0]

    def taken_back(self, seconds: float, scheduled_tokens: int = 0) -> list[int]:
        """The leases that it takes back in steps of 0.1 s."""
        found = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            found += self.half.step_work({"r": 1} if scheduled_tokens else {}).taken_back
        return found


def test_an_engine_that_stands_still_takes_its_leases_back_one_by_one() -> None:
    scheduler = Scheduler()
    for name in "ab":
        scheduler.prefilled(name)
    scheduler.arrives("waits")
    assert scheduler.taken_back(PATIENCE_S * 0.9) == []
    assert scheduler.taken_back(PATIENCE_S * 1.2) == [0]
    assert scheduler.taken_back(PATIENCE_S * 2.2) == [1]


def test_an_engine_that_computes_keeps_its_leases() -> None:
    scheduler = Scheduler()
    scheduler.prefilled("a")
    scheduler.arrives("runs")
    assert scheduler.taken_back(10, scheduled_tokens=1) == []


def test_an_engine_without_requests_keeps_its_leases() -> None:
    scheduler = Scheduler()
    scheduler.prefilled("a")
    assert scheduler.taken_back(10) == []


def test_a_producer_that_loads_nothing_keeps_its_leases() -> None:
    """It waits for nobody's blocks: its consumers will fetch them."""
    scheduler = Scheduler(consumes=False)
    scheduler.prefilled("a")
    scheduler.arrives("waits")
    assert scheduler.taken_back(10) == []


def test_an_engine_that_does_not_produce_keeps_no_blocks() -> None:
    scheduler, asked = Scheduler(produces=False), prefill()
    scheduler.half.on_new_request(asked)
    assert scheduler.half.request_finished(asked, [ATTENTION]) == (False, None)
    assert scheduler.taken_back(10) == []
    scheduler.half.update(KVConnectorOutput(finished_sending={"r"}))
    assert scheduler.half.take_stats().is_empty()
    assert scheduler.half.reset()


def test_what_both_parts_counted_is_one() -> None:
    scheduler = Scheduler()
    scheduler.prefilled("a")
    report = StepReport(leases=[LeaseReport("a", "fetched")])
    output = KVConnectorOutput(finished_sending={"a"}, kv_connector_worker_meta=report)
    scheduler.half.update(output)
    asked = request()
    asked.kv_transfer_params = {"do_remote_prefill": True, "disagg": "no ticket"}
    scheduler.half.on_new_request(asked)
    found = scheduler.half.take_stats().data
    assert found["leases"] == {"fetched": 1}
    assert found["leases_held"] == 0
    assert sum(found["failures"].values()) == 1
    assert scheduler.half.take_stats().is_empty()


def test_a_reset_is_told_to_the_workers() -> None:
    scheduler = Scheduler()
    for name in "ab":
        scheduler.prefilled(name)
    assert scheduler.half.reset()
    assert scheduler.half.step_work({}).revoked == 2


@pytest.mark.parametrize(
    ("params", "tokens"), [(PREFILL, LENGTH - 1), ({"do_remote_prefill": True}, LENGTH)]
)
def test_only_prefills_leave_out_a_token(params: dict[str, Any], tokens: int) -> None:
    """In engines with recurrent state that do both."""
    asked = request()
    asked.kv_transfer_params = params
    Scheduler(state_groups={0: BLOCK}).half.on_new_request(asked)
    assert asked.num_prompt_tokens == tokens


@pytest.mark.parametrize("params", [None, [PREFILL], "params", 7])
def test_params_that_are_no_object_are_not_passed_on(params: Any) -> None:
    """vLLM's scheduler calls .get() on them."""
    asked = request()
    asked.kv_transfer_params = params
    Scheduler().half.on_new_request(asked)
    assert asked.kv_transfer_params is None


def test_an_engine_that_only_waits_for_prompts_looks_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not if it computes, has work for its workers, or a prompt is whole."""
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    half = Scheduler().half
    followed = sign(Invitation("prefill-0", HOSTS, [2], BLOCK), SECRET)
    params = {
        "do_remote_prefill": True,
        kv_transfer_params.STREAM: "ab" * 16,
        kv_transfer_params.INVITATION: {"ticket": followed},
    }

    def naps_of(scheduled: dict[str, int] | None = None) -> int:
        naps.clear()
        half.step_work(scheduled or {})
        return len(naps)

    assert naps_of() == 0, "nothing is asked"
    asked = request()
    asked.kv_transfer_params = params
    half.on_new_request(asked)
    assert naps_of() == 0, "its worker has to watch"
    assert naps_of() == 1
    assert naps_of({"other": 1}) == 0
    half.consumer.begun([BegunReport(asked.request_id)])
    assert naps_of() == 0, "it waits for room"
    blocks: Any = SimpleNamespace(get_block_ids=lambda: (ATTENTION,))
    half.after_alloc(asked, blocks, LENGTH)
    assert naps_of() == 0, "its worker has to load"
    assert naps_of() == 1
    half.consumer.moved([], [asked.request_id])
    assert naps_of() == 0, "the last chunk comes"
