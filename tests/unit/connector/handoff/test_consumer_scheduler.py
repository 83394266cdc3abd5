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
from disagg.connector.handoff.messages import (
    BegunReport,
    HandoffLoad,
    LeaseMessage,
    LoadReport,
    SpanGrowth,
    StepWork,
    Watch,
)
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.connector.handoff.stall import PATIENCE_S
from disagg.transport.control.client import Endpoint
from disagg.transport.control.ticket import Handoff, Invitation, prompt_digest

LENGTH, LEASE_S = len(PROMPT), 30.0
HOSTS = [Endpoint("192.0.2.1", 4000, "life")]
DIGESTS = PromptDigests(BLOCK, "sha256")
STREAM = b"s" * 16
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

    def follows(self, asked: Request, block_size: int = BLOCK) -> None:
        """The lease of its own prompt, while it grows."""
        invited = Invitation("prefill-0", HOSTS, [2], block_size)
        self.half.on_new_request(asked, Requested(False, None, None, STREAM, invited))

    def begins(self, name: str = "r", problem: str | None = None) -> None:
        """Prefill, with the prompt of a request."""
        self.half.begun([BegunReport(name, problem)])

    def allocates(
        self, asked: Request, external: int, tables: tuple[list[int], ...] = ([1, 2, 3],)
    ) -> None:
        blocks: Any = SimpleNamespace(get_block_ids=lambda: tables)
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


# ---- leases that grow --------------------------------------------------------------------------


RELEASE_STREAM = LeaseMessage(-1, HOSTS, STREAM)


def digest_of(asked: Request, block: int = BLOCK, tokens: int = LENGTH) -> bytes:
    return prompt_digest(DIGESTS.of(asked, block, tokens))


def test_who_follows_takes_no_blocks_before_prefill_begins() -> None:
    """Nor does it renew what is not there; from then on it does, until it loads."""
    consumer, asked = Consumer(), request()
    consumer.follows(asked)
    digest = digest_of(asked)
    assert consumer.work() == StepWork(watches=[Watch("r", HOSTS[0], STREAM, digest)])
    consumer.clock.now += 100
    assert consumer.half.num_new_matched_tokens(asked, 0) == (None, False)
    assert consumer.work() == StepWork()
    consumer.begins("another")
    assert consumer.half.num_new_matched_tokens(asked, 0) == (None, False)
    consumer.begins()
    assert consumer.half.num_new_matched_tokens(asked, 0) == (LENGTH, True)
    assert consumer.work().renewals == [RELEASE_STREAM]
    consumer.allocates(asked, LENGTH)
    (load,) = consumer.work().loads
    expected = HandoffLoad("r", -1, HOSTS, ([2], [2]), BLOCK, ((0, 3),), 0, [1, 2, 3])
    grows = (SpanGrowth(0, BLOCK, BLOCK),)
    assert load == replace(expected, stream=STREAM, prompt=digest, growth=grows)
    consumer.half.update([LoadReport("r", "loaded", "tcp", 30, 0.1, hidden_bytes=20)], ["r"])
    stats = consumer.half.take_stats().data
    assert (stats["handoffs"], stats["bytes"]) == ({"tcp|loaded": 1}, {"tcp": 30})
    assert stats["hidden"] == {"tcp": 20}


@pytest.mark.parametrize(
    ("problem", "said"), [("lease_gone", [RELEASE_STREAM]), ("prompt_mismatch", [])]
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_prompt_that_prefill_never_begins_with(
    strict: bool, problem: str, said: list[LeaseMessage]
) -> None:
    """It is computed here, or fails; nobody else's request, or lease, is touched."""
    consumer, asked = Consumer(strict=strict), request()
    consumer.follows(asked)
    consumer.begins(problem=problem)
    consumer.begins(problem=problem)
    work = consumer.work()
    assert work.releases == said
    assert consumer.counts("failures") == {problem: 1}
    if not strict:
        assert consumer.half.num_new_matched_tokens(asked, 0) == (0, False)
    else:
        assert consumer.half.num_new_matched_tokens(asked, 0) == (LENGTH, True)
        consumer.allocates(asked, LENGTH)
        assert [load.problem for load in consumer.work().loads] == [problem]
    consumer.clock.now += 100
    assert consumer.work() == StepWork()


@pytest.mark.parametrize("end", ["finished", "reset"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_request_that_ends_while_it_waits(end: str, begun: bool) -> None:
    consumer, asked = Consumer(), request()
    consumer.follows(asked)
    if begun:
        consumer.begins()
    consumer.work()
    if end == "finished":
        consumer.half.request_finished("r")
    else:
        consumer.half.reset()
        assert consumer.half.num_new_matched_tokens(asked, 0) == (0, False)
    expected = StepWork(releases=[RELEASE_STREAM], unwatched=[] if begun else ["r"])
    assert consumer.work() == expected
    consumer.begins(problem="lease_gone")  # as it was under way
    assert consumer.work() == StepWork()
    assert consumer.counts("failures") == {}


def test_what_the_cache_has_is_not_waited_for() -> None:
    consumer, asked = Consumer(), request()
    consumer.follows(asked)
    assert consumer.half.num_new_matched_tokens(asked, LENGTH - 1) == (0, False)
    consumer.allocates(asked, 0)
    assert consumer.work().releases == [RELEASE_STREAM]
    consumer.begins(problem="lease_gone")
    assert consumer.half.num_new_matched_tokens(asked, 0) == (0, False)
    consumer.half.request_finished("r")
    assert consumer.work() == StepWork(unwatched=["r"])
    assert consumer.counts("handoffs") == {"none|local_hit": 1}


def test_embeddings_follow_nothing() -> None:
    consumer, asked = Consumer(), request()
    asked.prompt_embeds = torch.zeros(LENGTH, 2)
    consumer.follows(asked)
    assert consumer.half.num_new_matched_tokens(asked, 0) == (0, False)
    assert consumer.work() == StepWork()
    assert consumer.counts("failures") == {"prompt_embeds": 1}


def test_a_load_that_waits_for_a_prompt_counts_while_it_gets_on() -> None:
    """Else an engine that stands still would wait for one that waits for it."""
    consumer, asked = Consumer(), request()
    consumer.follows(asked)
    consumer.begins()
    assert not consumer.half.is_loading()
    consumer.allocates(asked, LENGTH)
    for _ in range(3):
        consumer.clock.now += PATIENCE_S * 0.9
        assert consumer.half.is_loading()
        consumer.half.moved(["r", "another"])
    consumer.clock.now += PATIENCE_S * 1.1
    assert not consumer.half.is_loading()
    other = request()
    other.request_id = "other"
    consumer.arrives(other, lease(other))
    consumer.allocates(other, LENGTH)
    consumer.clock.now += 100
    assert consumer.half.is_loading(), "this one has a deadline"


def test_a_stream_is_fetched_once_for_several_answers() -> None:
    """n > 1. A load that fails is tried by the next."""
    for outcome, then in (("loaded", (0, False)), ("failed", (LENGTH, True))):
        consumer, asked = Consumer(), [request(), request()]
        for number, one in enumerate(asked):
            one.request_id = f"r{number}"
            consumer.follows(one)
            consumer.begins(one.request_id)
        consumer.allocates(asked[0], LENGTH)
        assert consumer.half.num_new_matched_tokens(asked[1], 0) == (None, False)
        consumer.half.update([LoadReport("r0", outcome, "tcp", 1, 0.1)], ["r0"])
        assert consumer.half.num_new_matched_tokens(asked[1], 0) == then


@pytest.mark.parametrize(
    ("theirs", "cached", "unit", "spans", "first", "per_block", "growth"),
    [
        (BLOCK, 16, BLOCK, ((1, 3),), 0, 1, SpanGrowth(0, BLOCK, BLOCK)),
        (8, 16, 8, ((2, 5),), 0, 2, SpanGrowth(0, 8, 8)),
        (8, 8, 8, ((1, 5),), 1, 2, SpanGrowth(0, 8, 8)),
        (32, 16, BLOCK, ((1, 3),), 0, 1, SpanGrowth(0, BLOCK, 32)),
    ],
)
def test_blocks_of_two_sizes(
    theirs: int, cached: int, unit: int, spans: object, first: int, per_block: int, growth: object
) -> None:
    """The producer's block is final as a whole."""
    consumer, asked = Consumer(splits_blocks=True), request()
    consumer.follows(asked, theirs)
    consumer.begins()
    consumer.allocates(asked, LENGTH - cached)
    (load,) = consumer.work().loads
    assert (load.unit, load.spans, load.first) == (unit, spans, first)
    assert (load.per_block, load.growth) == (per_block, (growth,))
    assert load.prompt == digest_of(asked, theirs)
    assert load.block_ids == ([1, 2, 3] if cached < BLOCK else [2, 3])


def test_with_windows_what_may_be_freed_goes_last() -> None:
    """The second group has a window of 20 tokens. Of what is loaded of it, the first block is not
    wholly within the last token's."""
    facts: dict[str, Any] = {"windows": True, "groups": 2, "late_groups": {1: 20}}
    consumer, asked = Consumer(**facts), request()
    consumer.follows(asked)
    consumer.begins()
    consumer.allocates(asked, LENGTH - 1, ([1, 2, 3], [0, 5, 6]))
    (load,) = consumer.work().loads
    assert load.spans == ((0, 3), (4, 5), (5, 6))
    assert load.growth == tuple(
        SpanGrowth(before, BLOCK, block) for before, block in ((0, BLOCK), (3, 0), (3, BLOCK))
    )
    assert load.block_ids == [1, 2, 3, 5, 6]
    # A lease that is granted is fetched as one.
    consumer = Consumer(**facts)
    consumer.arrives(asked, lease(asked))
    consumer.allocates(asked, LENGTH - 1, ([1, 2, 3], [0, 5, 6]))
    (load,) = consumer.work().loads
    assert load.spans == ((0, 3), (4, 6))


def test_a_state_goes_last_and_stands_before_the_last_token() -> None:
    facts: dict[str, Any] = {"windows": True, "groups": 2, "late_groups": {0: 0}}
    consumer, asked = Consumer(**facts, state_groups={0: BLOCK}), request()
    consumer.follows(asked)
    assert [one.prompt for one in consumer.work().watches] == [digest_of(asked, tokens=LENGTH - 1)]
    consumer.begins()
    assert consumer.half.num_new_matched_tokens(asked, 0) == (LENGTH - 1, True)
    consumer.allocates(asked, LENGTH - 1, ([0, 0, 9], [1, 2, 3]))
    (load,) = consumer.work().loads
    assert load.spans == ((2, 3), (3, 6))
    assert [one.block for one in load.growth] == [0, BLOCK]
    assert load.block_ids == [9, 1, 2, 3]
    one_token = request([5])
    one_token.request_id = "one"
    consumer.follows(one_token)
    assert consumer.half.num_new_matched_tokens(one_token, 0) == (0, False)
