"""Which finished prefills keep their blocks, under which lease, and what is counted of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.connector.handoff.test_block_digests import BLOCK, PROMPT, request
from unit.connector.handoff.test_consumer_scheduler import DIGESTS, FACTS, HOSTS, LEASE_S
from vllm.v1.request import Request, RequestStatus

from disagg.connector.handoff.kv_transfer_params import INVITATION
from disagg.connector.handoff.messages import Grant, Growing, Grown, LeaseReport, StepWork
from disagg.connector.handoff.producer_scheduler import ProducerScheduler
from disagg.transport.control.ticket import (
    Handoff,
    Invitation,
    prompt_digest,
    verify,
    verify_invitation,
)

SECRET = b"0" * 32
STREAM = b"s" * 16
LENGTH = len(PROMPT)
PREFILL = {"do_remote_decode": True}
KEEPS_TOKEN = {**PREFILL, "first_token": True}
ATTENTION, STATE = [5, 6, 7, 8], [0, 0, 2, 3]
"""A request's blocks of two groups: three of its prompt, and one of its answer."""


class Producer:
    """The scheduler's part of an engine with two pipeline stages."""

    def __init__(self, *, streams: bool = True, **facts: Any) -> None:
        self.half = ProducerScheduler(replace(FACTS, **facts), SECRET, LEASE_S, streams=streams)
        self.half.set_workers(HOSTS, [2, 1])
        self.half.set_blocks(lambda name: [ATTENTION])

    def work(self, *scheduled: str) -> StepWork:
        work = StepWork()
        self.half.add_step_work(work, scheduled)
        return work

    def begins(self, name: str = "r", computed: int = 0) -> Request:
        """A prefill whose stream is followed, in its first step and behind it."""
        asked = prefill(name)
        asked.status, asked.num_computed_tokens = RequestStatus.RUNNING, 0
        self.half.on_prefill(asked, STREAM)
        work = self.work(name)
        digest = prompt_digest(DIGESTS.of(asked, BLOCK, LENGTH))
        assert [(one.stream, one.prompt, one.blocks) for one in work.growing] == [
            (STREAM, digest, 3)
        ]
        asked.num_computed_tokens = computed
        return asked

    def grant(self, name: str) -> dict[str, Any] | None:
        """A prefill that is finished; the params of its answer."""
        _, params = self.half.request_finished(prefill(name), [ATTENTION])
        return params

    def ends(self, name: str, outcome: str) -> None:
        """On all ranks."""
        self.half.update([LeaseReport(name, outcome)], [name])

    def stats(self) -> dict[str, Any]:
        return self.half.take_stats().data


def prefill(name: str = "r", params: dict[str, Any] | None = PREFILL, **more: Any) -> Request:
    """One that computed its prompt, and then drew a token."""
    made = request(**more)
    made.request_id, made.kv_transfer_params = name, params
    made.status, made.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, LENGTH
    return made


def test_a_finished_prefill_is_granted_once() -> None:
    producer, asked = Producer(), prefill()
    keeps, params = producer.half.request_finished(asked, [ATTENTION])
    assert keeps
    assert params is not None
    digests = DIGESTS.of(asked, BLOCK, LENGTH)
    expected = Handoff(FACTS.engine_id, 0, HOSTS, [2, 1], LENGTH, BLOCK, digests)
    assert verify(params["disagg"], SECRET) == expected
    assert params["remote_block_ids"] == [[5, 6, 7]]
    assert producer.work() == StepWork(grants=[Grant(0, "r", [5, 6, 7], LEASE_S)])
    assert producer.work() == StepWork()


def test_leases_are_numbered_upwards() -> None:
    producer = Producer()
    for name in "abc":
        assert producer.grant(name) is not None
    assert [grant.lease for grant in producer.work().grants] == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"status": RequestStatus.FINISHED_ABORTED},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"do_remote_decode": False}},
        {"num_computed_tokens": LENGTH - 1},
        {"prompt_embeds": torch.zeros(LENGTH, 4)},
    ],
)
def test_what_is_not_kept(change: dict[str, Any]) -> None:
    producer, asked = Producer(), prefill()
    for name, value in change.items():
        setattr(asked, name, value)
    assert producer.half.request_finished(asked, [ATTENTION]) == (False, None)
    assert producer.work() == StepWork()


def test_with_windows_all_groups_are_kept_and_what_was_freed_is_named() -> None:
    producer = Producer(windows=True)
    producer.half.request_finished(prefill(), [ATTENTION, STATE])
    (grant,) = producer.work().grants
    assert grant.block_ids == [5, 6, 7, -1, -1, 2]


@pytest.mark.parametrize(
    ("params", "arrives", "computed", "is_kept"),
    [
        (PREFILL, True, LENGTH - 1, True),
        (PREFILL, False, LENGTH, False),  # its state stands behind the last token
        (KEEPS_TOKEN, True, LENGTH, True),
        (KEEPS_TOKEN, True, LENGTH + 1, False),  # its state stands behind its answer
    ],
)
def test_a_state_is_kept_where_a_consumer_can_use_it(
    params: dict[str, Any], arrives: bool, computed: int, is_kept: bool
) -> None:
    producer, asked = Producer(state_groups={1: BLOCK}), prefill(params=params)
    if arrives:
        producer.half.on_prefill(asked)
    asked.num_computed_tokens = computed
    keeps, answer = producer.half.request_finished(asked, [ATTENTION, STATE])
    assert keeps == is_kept
    assert (answer is not None) == is_kept
    if answer is not None:
        assert verify(answer["disagg"], SECRET).num_tokens == computed
        assert answer["remote_block_ids"] == [[5, 6, 7], [0, 0, 2]]
    assert not producer.half._without_last_token


def test_the_oldest_lease_is_taken_back_and_each_once() -> None:
    producer = Producer()
    for name in "abc":
        producer.grant(name)
    producer.ends("a", "fetched")
    for _ in range(3):
        producer.half.take_back_oldest()
    assert producer.work().taken_back == [1, 2]
    assert producer.work().taken_back == []


def test_a_reset_ends_the_leases_before_it() -> None:
    producer = Producer()
    for name in "ab":
        producer.grant(name)
    producer.half.revoke_all()
    producer.grant("c")
    assert producer.work().revoked == 2
    assert producer.work().revoked == 0


def test_leases_are_counted_when_they_have_ended_on_all_ranks() -> None:
    producer = Producer()
    for name in "ab":
        producer.grant(name)
    assert producer.stats() == {"leases_held": 2}
    producer.half.update([LeaseReport("a", "expired")], [])
    assert producer.stats() == {}
    producer.half.update([], ["a", "of another connector"])
    assert producer.stats() == {"leases_held": 1, "leases": {"expired": 1}}
    producer.ends("b", "fetched")
    assert producer.stats() == {"leases_held": 0, "leases": {"fetched": 1}}


@pytest.mark.parametrize(("max_tokens", "grows"), [(BLOCK, True), (BLOCK + 1, False)])
def test_no_lease_grows_whose_answer_may_pass_a_window(max_tokens: int, grows: bool) -> None:
    """vLLM would free blocks that a consumer was told to be final, and give them to others."""
    producer = Producer(windows=True, groups=2, late_groups={1: BLOCK}, step_tokens=LENGTH)
    producer.half.set_blocks(lambda _: [ATTENTION, ATTENTION])
    asked = request()
    asked.max_tokens, asked.kv_transfer_params = max_tokens, PREFILL
    producer.half.on_prefill(asked, b"stream")
    work = StepWork()
    producer.half.add_step_work(work, [asked.request_id])
    assert [one.stream for one in work.growing] == [b"stream"] * grows
    assert work.unwanted == [b"stream"] * (not grows)


# ---- leases that grow --------------------------------------------------------------------------


def test_a_lease_that_grew_is_granted_under_its_number() -> None:
    producer = Producer(step_tokens=128)
    assert producer.grant("before") is not None
    asked = producer.begins("r", computed=32)
    assert producer.work("r").grown == [Grown(1, 0, 32, [(0, [5, 6])])]
    assert producer.grant("between") is not None
    asked.status, asked.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, LENGTH
    keeps, params = producer.half.request_finished(asked, [ATTENTION])
    assert keeps
    assert params is not None
    assert verify(params["disagg"], SECRET).lease == 1
    work = producer.work()
    assert [grant.lease for grant in work.grants] == [2, 1]
    assert (work.stopped, work.grown) == ([], [])
    assert params[INVITATION]["step_tokens"] == 128
    invited = verify_invitation(params[INVITATION]["ticket"], SECRET)
    assert invited == Invitation(FACTS.engine_id, HOSTS, [2, 1], BLOCK)


def test_a_prompt_that_is_not_kept_grows_no_more() -> None:
    producer = Producer()
    asked = producer.begins(computed=32)
    asked.status = RequestStatus.FINISHED_ABORTED
    assert producer.half.request_finished(asked, [ATTENTION]) == (False, None)
    assert producer.work() == StepWork(stopped=[0])
    assert producer.work() == StepWork()


def test_a_prompt_that_never_begins_is_told_by_its_stream() -> None:
    producer, asked = Producer(), prefill()
    producer.half.on_prefill(asked, STREAM)
    asked.status = RequestStatus.FINISHED_ABORTED
    producer.half.request_finished(asked, [ATTENTION])
    assert producer.work("r") == StepWork(unwanted=[STREAM])


def test_after_a_reset_a_prompt_has_another_lease() -> None:
    """What it was granted before the reset holds blocks of other weights."""
    producer = Producer()
    asked = producer.begins(computed=32)
    producer.half.revoke_all()
    work = producer.work("r")
    assert (work.revoked, work.grown) == (1, [])
    asked.status, asked.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, LENGTH
    producer.half.request_finished(asked, [ATTENTION])
    assert producer.work() == StepWork(grants=[Grant(1, "r", [5, 6, 7], LEASE_S)])


def test_where_leases_are_not_followed_who_follows_is_told() -> None:
    producer, asked = Producer(streams=False, step_tokens=128), prefill()
    producer.half.on_prefill(asked, STREAM)
    assert producer.work("r") == StepWork(unwanted=[STREAM])
    params = producer.grant("r")
    assert params is not None
    assert INVITATION not in params


@pytest.mark.parametrize(("tokens", "grows"), [(LENGTH, True), (1, False)])
def test_a_state_grows_without_the_last_token(tokens: int, grows: bool) -> None:
    """Of a prompt of one token there is none before it."""
    asked = prefill(tokens=PROMPT[:tokens])
    asked.status, asked.num_computed_tokens = RequestStatus.WAITING, 0
    facts: dict[str, Any] = {"windows": True, "groups": 2, "state_groups": {1: BLOCK}}
    producer = Producer(**facts, late_groups={1: 0})
    producer.half.on_prefill(asked, STREAM)
    work = producer.work("r")
    assert asked.num_prompt_tokens == (LENGTH - 1 if grows else 1)
    digest = prompt_digest(DIGESTS.of(asked, BLOCK, asked.num_prompt_tokens))
    assert work.growing == ([Growing(0, "r", STREAM, digest, 6)] if grows else [])
    assert work.unwanted == ([] if grows else [STREAM])
