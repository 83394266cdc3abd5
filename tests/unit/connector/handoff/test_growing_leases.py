"""What a producer's scheduler tells its workers of prompts that are being computed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from unit.connector.handoff.test_block_digests import BLOCK, request
from unit.connector.handoff.test_consumer_scheduler import DIGESTS, FACTS
from vllm.v1.request import Request

from disagg.connector.handoff.growing_leases import GrowingLeases
from disagg.connector.handoff.messages import Growing, Grown, StepWork
from disagg.transport.control.lease import LeaseTable
from disagg.transport.control.ticket import prompt_digest

STREAM, OTHER = b"s" * 16, b"t" * 16
LENGTH = 100
WINDOWS: dict[str, Any] = {"windows": True, "groups": 2, "late_groups": {1: 40}}
"""The second group has a window of 40 tokens. Of a prompt of 100, block 4 is the first that is not
before the window of the last token."""
STATES: dict[str, Any] = {
    "windows": True,
    "groups": 2,
    "late_groups": {0: 0},
    "state_groups": {0: 1},
}
MIXED: dict[str, Any] = {"windows": True, "groups": 2, "group_block_sizes": (BLOCK, 2 * BLOCK)}


def prompt(name: str = "r", length: int = LENGTH) -> Request:
    made = request([(7 * at) % 1000 for at in range(length)])
    made.request_id = name
    return made


@dataclass
class Producer:
    """vLLM's scheduler, as the leases see it."""

    leases: GrowingLeases
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    granted: int = -1

    def asked(self, asked: Request, stream: bytes = STREAM, groups: int = 1) -> None:
        self.tables[asked.request_id] = [
            [100 * group + at for at in range(20)] for group in range(groups)
        ]
        self.leases.asked(asked, stream)

    def number(self) -> int:
        self.granted += 1
        return self.granted

    def step(self, *scheduled: str) -> StepWork:
        work = StepWork()
        self.leases.step(scheduled, self.tables.__getitem__, self.number)
        self.leases.add_work(work)
        return work


def producer(**facts: Any) -> Producer:
    return Producer(GrowingLeases(replace(FACTS, **facts)))


def test_a_prompt_of_three_steps() -> None:
    """What a step computes counts from the next one on, and whole blocks alone."""
    made, asked = producer(), prompt()
    made.asked(asked)
    assert made.step() == StepWork(queued=[STREAM]), "it waits"
    assert made.step() == StepWork()
    digest = prompt_digest(DIGESTS.of(asked, BLOCK, LENGTH))
    assert made.step("r") == StepWork(growing=[Growing(0, "r", STREAM, digest, 7)])
    asked.num_computed_tokens = 40
    assert made.step("r") == StepWork(grown=[Grown(0, 0, 40, [(0, [0, 1])])])
    asked.num_computed_tokens = 90
    assert made.step("r").grown == [Grown(0, 0, 90, [(2, [2, 3, 4])])]
    assert made.step("r") == StepWork(), "there is no news"
    asked.num_computed_tokens = LENGTH + 5
    assert made.step("r").grown == [Grown(0, 0, LENGTH, [(5, [5])])]
    assert made.leases.ends("r") == 0
    assert made.step() == StepWork()
    made.leases.stop(0)
    assert made.step() == StepWork(stopped=[0])


def test_what_others_compute_in_its_first_step_counts_behind_that() -> None:
    """vLLM lets requests of one step share blocks that this very step fills."""
    made, asked = producer(), prompt()
    asked.num_computed_tokens = 48
    made.asked(asked)
    work = made.step("r")
    assert (len(work.growing), work.grown) == (1, [])
    assert made.step("r").grown == [Grown(0, 0, 48, [(0, [0, 1, 2])])]


@pytest.mark.parametrize("tokens", [0, 16, 40])
def test_a_request_that_lost_its_blocks_begins_anew(tokens: int) -> None:
    """Its blocks count behind the first step that it is in again, with whatever was cached."""
    made, asked = producer(), prompt()
    made.asked(asked)
    made.step("r")
    asked.num_computed_tokens = tokens
    made.step("r")
    asked.num_computed_tokens, asked.num_preemptions = 0, 1
    made.tables["r"] = []
    assert made.step() == StepWork(grown=[Grown(0, 1, 0, [])])
    made.tables["r"] = [list(range(50, 70))]
    asked.num_computed_tokens = 32
    assert made.step() == StepWork()
    assert made.step("r") == StepWork(), "its first step"
    asked.num_computed_tokens = 64
    assert made.step("r").grown == [Grown(0, 1, 64, [(0, [50, 51, 52, 53])])]


def test_a_request_that_is_resumed_at_once_begins_anew() -> None:
    """The prefix cache may have as many tokens as it had computed; its blocks are others."""
    made, asked = producer(), prompt()
    made.asked(asked)
    made.step("r")
    asked.num_computed_tokens = 48
    made.step("r")
    asked.num_preemptions, made.tables["r"] = 1, [list(range(50, 70))]
    assert made.step("r").grown == [Grown(0, 1, 0, [])]
    assert made.step("r").grown == [Grown(0, 1, 48, [(0, [50, 51, 52])])]


@pytest.mark.parametrize(
    ("facts", "blocks", "at_48", "at_90"),
    [
        (WINDOWS, 14, [(0, [0, 1, 2])], [(3, [3, 4]), (7 + 4, [104])]),
        (STATES, 14, [(7, [100, 101, 102])], [(7 + 3, [103, 104])]),
        (MIXED, 7 + 4, [(0, [0, 1, 2]), (7, [100])], [(3, [3, 4]), (7 + 1, [101])]),
        ({"groups": 2}, 7, [(0, [0, 1, 2])], [(3, [3, 4])]),
    ],
)
def test_groups_in_order(facts: dict[str, Any], blocks: int, at_48: object, at_90: object) -> None:
    """Blocks that may be freed while the prompt is computed are not told."""
    made, asked = producer(**facts), prompt()
    made.asked(asked, groups=2)
    (began,) = made.step("r").growing
    assert began.blocks == blocks
    found = []
    for tokens in (48, 90):
        asked.num_computed_tokens = tokens
        found += [one.blocks for one in made.step("r").grown]
    assert found == [at_48, at_90]


def test_a_stream_is_of_one_request() -> None:
    """With n > 1 others name it too, perhaps while the first one is computed."""
    made = producer()
    for name in "ab":
        made.asked(prompt(name))
    assert [one.request_id for one in made.step("a", "b").growing] == ["a"]
    made.asked(prompt("c"))
    assert made.step("a", "b", "c").growing == []
    assert [made.leases.ends(name) for name in "abc"] == [0, None, None]
    made.asked(prompt("d"))
    assert [one.request_id for one in made.step("d").growing] == ["d"]
    assert made.granted == 1


def test_requests_that_end_before_they_begin() -> None:
    made, embeds = producer(), prompt("embeds")
    made.asked(prompt("r"))
    assert made.leases.ends("r") is None
    assert made.leases.ends("r") is None
    assert made.step("r") == StepWork(unwanted=[STREAM])
    embeds.prompt_embeds = torch.zeros(LENGTH, 2)
    made.asked(embeds)
    made.leases.will_not_grow(OTHER)
    assert made.step("embeds") == StepWork(unwanted=[STREAM, OTHER])
    made.asked(prompt("again"))
    assert len(made.step("again").growing) == 1


def test_after_a_reset_nothing_of_before_grows() -> None:
    """What waits has computed nothing yet."""
    made, asked = producer(), prompt("before")
    made.asked(asked)
    made.step("before")
    waits = prompt("waits")
    made.asked(waits, OTHER)
    made.leases.forget()
    asked.num_computed_tokens = 48
    assert [one.request_id for one in made.step("before", "waits").growing] == ["waits"]
    assert made.leases.ends("before") is None
    made.asked(prompt("again"))
    assert len(made.step("again").growing) == 1


@pytest.mark.parametrize("facts", [{}, WINDOWS, STATES, MIXED])
def test_any_steps(facts: dict[str, Any]) -> None:
    """A worker knows all blocks that are final and no others, whatever was lost in between."""
    rng = random.Random(5)
    groups = facts.get("groups", 1)
    for number in range(200):
        length = rng.randrange(1, 300)
        made, table, asked = producer(**facts), LeaseTable(20), prompt(length=length)
        made.asked(asked, groups=groups)
        final, was_scheduled, fresh = 0, False, number
        for _ in range(12):
            if rng.random() < 0.15:  # preempted
                asked.num_computed_tokens, was_scheduled = 0, False
                asked.num_preemptions += 1
                fresh += 1000
                made.tables["r"] = [
                    [fresh + 400 * group + at for at in range(20)] for group in range(groups)
                ]
            is_scheduled = rng.random() < 0.7
            if is_scheduled and not was_scheduled:  # found in the prefix cache
                asked.num_computed_tokens = rng.choice((0, 0, 16, 32, 64))
            apply(table, made.step(*["r"] * is_scheduled))
            final = asked.num_computed_tokens if was_scheduled else 0
            was_scheduled = was_scheduled or is_scheduled
            if STREAM in table._streams:
                known = table._streams[STREAM].block_ids
                assert list(known) == expected(made, min(final, length), length)
            if is_scheduled:
                asked.num_computed_tokens += rng.choice((1, 7, 16, 33, 128))


def apply(table: LeaseTable, work: StepWork) -> None:
    """As `ProducerWorker.start`."""
    for new in work.growing:
        table.grow(new.lease, new.request_id, new.stream, new.prompt, new.blocks)
    for one in work.grown:
        if one.blocks:
            table.extend(one.lease, one.epoch, one.blocks, one.tokens)
        else:
            table.begin_anew(one.lease, one.epoch)


def expected(made: Producer, tokens: int, length: int) -> list[int]:
    """Of a lease of so many tokens, where the first `tokens` are final."""
    engine, found = made.leases._engine, list[int]()
    for group, table in enumerate(made.tables["r"]):
        size = engine.tokens_of(group)
        first: int | None = 0
        if group in engine.late_groups:
            window = engine.late_groups[group]
            # vLLM frees a block when none of its tokens is seen by the next one.
            kept = [at for at in range(30) if at * size > length - window]
            first = kept[0] if window else None
        found += [
            table[at] if first is not None and first <= at < tokens // size else -1
            for at in range(-(-length // size))
        ]
    return found
