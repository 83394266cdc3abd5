"""What a request's load does at each of its states, and what the producer hears of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from unit.connector.handoff.test_block_digests import BLOCK, PROMPT, request
from vllm.v1.request import Request

from disagg.connector.handoff.block_digests import PromptDigests
from disagg.connector.handoff.consumer_scheduler import ConsumerScheduler
from disagg.connector.handoff.engine_facts import EngineFacts
from disagg.connector.handoff.kv_transfer_params import Requested
from disagg.connector.handoff.messages import LeaseMessage, LoadReport, StepWork
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.transport.control.client import Endpoint
from disagg.transport.control.ticket import Handoff

LENGTH, LEASE_S = len(PROMPT), 30.0
HOSTS = [Endpoint("192.0.2.1", 4000, "life")]
DIGESTS = PromptDigests(BLOCK, "sha256")
FACTS = EngineFacts("decode-0", BLOCK, BLOCK, 1, 4, False, {}, False, False, DIGESTS)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Consumer:
    """The scheduler's part, and vLLM's calls to it."""

    def __init__(self, *, consumes: bool = True, strict: bool = False, **facts: Any) -> None:
        settings = ConnectorSettings(lease_s=LEASE_S, strict=strict)
        self.clock = Clock()
        self.half = ConsumerScheduler(
            replace(FACTS, **facts), settings, consumes=consumes, clock=self.clock
        )
        self.half.set_layers([2])

    def arrives(self, asked: Request, handoff: Handoff) -> None:
        self.half.on_new_request(asked, Requested(False, handoff, None))

    def allocates(self, asked: Request, external: int) -> None:
        blocks: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
        self.half.after_alloc(asked, blocks, external)

    def work(self) -> StepWork:
        return self.half.step_work()

    def counts(self, family: str) -> dict[str, int]:
        return dict(getattr(self.half.take_stats(), "data", {}).get(family, {}))


def lease(asked: Request, number: int = 5, tokens: int = LENGTH, **more: Any) -> Handoff:
    digests = DIGESTS.of(asked, BLOCK, tokens)
    whole = Handoff("prefill-0", number, HOSTS, [2], tokens, BLOCK, digests)
    values = {name: getattr(whole, name) for name in whole.__struct_fields__}
    return Handoff(**{**values, **more})


RELEASE = LeaseMessage(5, HOSTS)


def test_a_request_that_waits_renews_its_lease() -> None:
    """Each third of the lease's time, until it loads."""
    consumer, asked = Consumer(), request()
    consumer.arrives(asked, lease(asked))
    renewed = []
    for _ in range(100):
        consumer.clock.now += 1
        renewed += [(consumer.clock.now - 1000, one) for one in consumer.work().renewals]
    assert [one for _, one in renewed] == [RELEASE] * 9
    assert [when for when, _ in renewed] == [11.0 * n for n in range(1, 10)]
    consumer.allocates(asked, LENGTH - 1)
    consumer.clock.now += 100
    assert consumer.work().renewals == []


def test_what_strict_refuses_is_released_and_not_renewed() -> None:
    consumer, asked = Consumer(strict=True, world_size=3), request()
    consumer.arrives(asked, lease(asked))
    assert consumer.work().releases == [RELEASE]
    consumer.clock.now += 100
    assert consumer.work().renewals == []
    assert consumer.half.num_new_matched_tokens(asked, 0) == (LENGTH, True)
    consumer.allocates(asked, LENGTH)
    assert [load.problem for load in consumer.work().loads] == ["tensor_parallel_size"]


@pytest.mark.parametrize(
    ("change", "facts", "problem"),
    [
        ({"block_size": 8}, {}, "block_size"),
        ({"block_size": 8}, {"windows": True, "splits_blocks": True}, "block_size"),
        ({"block_size": 24}, {"splits_blocks": True}, "block_size"),
        ({"block_size": 0}, {"splits_blocks": True}, "block_size"),
        ({"layers": [3]}, {}, "pipeline_parallel_size"),
        ({}, {"world_size": 3}, "tensor_parallel_size"),
        ({"endpoints": HOSTS * 2}, {"whole_blocks": True}, "tensor_parallel_size"),
        ({}, {"state_groups": {0: BLOCK}}, "state"),
        ({"digests": bytes(24)}, {}, "prompt_mismatch"),
    ],
)
def test_what_cannot_be_loaded_is_computed(
    change: dict[str, Any], facts: dict[str, Any], problem: str
) -> None:
    consumer, asked = Consumer(**facts), request()
    consumer.arrives(asked, lease(asked, **change))
    assert consumer.half.num_new_matched_tokens(asked, 0) == (0, False)
    # Of another prompt's lease the consumer says nothing: it may be somebody else's.
    hosts = change.get("endpoints", HOSTS)
    said = [] if problem == "prompt_mismatch" else [LeaseMessage(5, hosts)]
    assert consumer.work().releases == said
    assert consumer.counts("failures") == {problem: 1}


def test_a_producer_loads_nothing_and_releases_nothing() -> None:
    """It has no connections to other producers."""
    consumer, asked = Consumer(consumes=False), request()
    consumer.arrives(asked, lease(asked))
    assert consumer.half.num_new_matched_tokens(asked, 0) == (0, False)
    assert consumer.work() == StepWork()
    assert consumer.counts("failures") == {"role": 1}


def test_prompts_of_embeddings_are_computed() -> None:
    consumer, asked = Consumer(), request()
    handoff = lease(asked)
    asked.prompt_embeds = torch.zeros(LENGTH, 2)
    consumer.arrives(asked, handoff)
    assert consumer.half.num_new_matched_tokens(asked, 0) == (0, False)
    assert consumer.counts("failures") == {"prompt_embeds": 1}


@pytest.mark.parametrize(
    ("facts", "loaded"),
    [({}, LENGTH), ({"windows": True}, LENGTH - 1), ({"speculates": True}, LENGTH - 2)],
)
def test_how_much_is_loaded(facts: dict[str, Any], loaded: int) -> None:
    consumer, asked = Consumer(**facts), request()
    consumer.arrives(asked, lease(asked))
    assert consumer.half.num_new_matched_tokens(asked, 0) == (loaded, True)
    assert consumer.half.num_new_matched_tokens(asked, 32) == (loaded - 32, True)
    assert consumer.half.num_new_matched_tokens(asked, LENGTH - 1) == (0, False)


def test_a_lease_of_a_shorter_prompt_serves_its_beginning() -> None:
    asked = request([*PROMPT, *range(900, 920)])
    for windows, loaded in ((False, (LENGTH, True)), (True, (LENGTH, True))):
        consumer = Consumer(windows=windows)
        consumer.arrives(asked, lease(request()))
        assert consumer.half.num_new_matched_tokens(asked, 0) == loaded
    # Another prompt from the middle of a block on: whole blocks, but no windows, which end there.
    other = request([*PROMPT[:36], *range(900, 920)])
    for windows, loaded in ((False, (32, True)), (True, (0, False))):
        consumer = Consumer(windows=windows)
        consumer.arrives(other, lease(request()))
        assert consumer.half.num_new_matched_tokens(other, 0) == loaded


def test_a_state_before_the_last_token_is_loaded() -> None:
    consumer, asked = Consumer(state_groups={0: BLOCK}), request()
    consumer.arrives(asked, lease(request(PROMPT[:-1]), tokens=LENGTH - 1))
    assert consumer.half.num_new_matched_tokens(asked, 0) == (LENGTH - 1, True)


@pytest.mark.parametrize("external", [0, LENGTH])
def test_an_aborted_request_ends_its_lease_or_its_load(external: int) -> None:
    consumer, asked = Consumer(), request()
    consumer.arrives(asked, lease(asked))
    if external:
        consumer.allocates(asked, external)
        assert consumer.half.is_loading()
    consumer.half.request_finished("r")
    work = consumer.work()
    assert work.releases == ([] if external else [RELEASE])
    assert work.cancels == (["r"] if external else [])
    if external:
        # vLLM keeps the blocks until the worker has reported.
        consumer.half.update([LoadReport("r", "aborted", "none", 0, 0.0)], ["r"])
    assert not consumer.half.is_loading()
    assert consumer.half._loads == {}
    assert consumer.counts("handoffs") == {"none|aborted": 1}


def test_what_the_cache_has_is_not_loaded() -> None:
    for cached, found in ((32, "local_hit"), (16, "computed"), (0, "computed")):
        consumer, asked = Consumer(), request()
        consumer.arrives(asked, lease(asked))
        consumer.half.num_new_matched_tokens(asked, cached)
        consumer.allocates(asked, 0)
        assert consumer.work().releases == [RELEASE]
        assert consumer.counts("handoffs") == {f"none|{found}": 1}
        consumer.half.request_finished("r")
        assert consumer.work().releases == []


def test_a_lease_is_fetched_once_for_several_answers() -> None:
    """n > 1. The others wait, then look into the cache; a failed fetch is tried by the next."""
    for outcome in ("loaded", "failed"):
        consumer, asked = Consumer(), [request(), request(), request()]
        for number, one in enumerate(asked):
            one.request_id = f"r{number}"
            consumer.arrives(one, lease(one))
        consumer.allocates(asked[0], LENGTH)
        assert consumer.half.num_new_matched_tokens(asked[1], 0) == (None, False)
        consumer.half.update([LoadReport("r0", outcome, "tcp", 1, 0.1)], ["r0"])
        expected = (0, False) if outcome == "loaded" else (LENGTH, True)
        assert consumer.half.num_new_matched_tokens(asked[1], 0) == expected
        consumer.half.request_finished("r2")
        assert consumer.work().releases == ([] if outcome == "loaded" else [RELEASE])


def test_other_leases_do_not_wait() -> None:
    consumer, asked = Consumer(), [request(), request()]
    for number, one in enumerate(asked):
        one.request_id = f"r{number}"
        consumer.arrives(one, lease(one, number))
    consumer.allocates(asked[0], LENGTH)
    assert consumer.half.num_new_matched_tokens(asked[1], 0) == (LENGTH, True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_reset_leaves_nothing_of_before(strict: bool) -> None:
    consumer = Consumer(strict=strict)
    queued, loading, refused = request(), request(), request()
    for name, one in (("queued", queued), ("loading", loading), ("refused", refused)):
        one.request_id = name
    consumer.arrives(queued, lease(queued, 1))
    consumer.arrives(loading, lease(loading, 2))
    consumer.arrives(refused, lease(refused, 3, block_size=8))
    consumer.allocates(loading, LENGTH)
    consumer.work()
    consumer.half.reset()
    work = consumer.work()
    assert work.cancels == ["loading"]
    assert work.releases == [LeaseMessage(1, HOSTS)]
    assert consumer.half.num_new_matched_tokens(queued, 0) == (0, False)
    # What strict refused has to fail, whatever is reset.
    kept = (LENGTH, True) if strict else (0, False)
    assert consumer.half.num_new_matched_tokens(refused, 0) == kept


def test_the_worst_of_several_ranks_counts() -> None:
    good = LoadReport("r", "loaded", "tcp", 10, 0.1)
    for reports, label in (
        ([good, good], "tcp|loaded"),
        ([good, LoadReport("r", "failed", "none", 0, 0.0, "deadline")], "none|failed"),
        ([LoadReport("r", "aborted", "none", 0, 0.0), good], "none|aborted"),
    ):
        consumer, asked = Consumer(), request()
        consumer.arrives(asked, lease(asked))
        consumer.allocates(asked, LENGTH)
        consumer.half.update(reports[:1], [])
        assert consumer.half.is_loading()
        consumer.half.update(reports[1:], ["r"])
        assert not consumer.half.is_loading()
        stats = consumer.half.take_stats()
        assert stats.data["handoffs"] == {label: 1}
        assert stats.data.get("bytes", {}) == ({"tcp": 20} if "loaded" in label else {})
        assert stats.data.get("failures", {}) == ({"deadline": 1} if "failed" in label else {})
