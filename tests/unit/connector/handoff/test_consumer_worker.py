"""The consumer part of worker ranks, with real producer ranks over loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg.connector.handoff import consumer_worker, follower, per_peer_threads, sharding
from disagg.connector.handoff.consumer_worker import ConsumerWorker
from disagg.connector.handoff.messages import (
    BegunReport,
    Grant,
    Growing,
    Grown,
    HandoffLoad,
    LeaseMessage,
    LoadReport,
    SpanGrowth,
    StepWork,
    Watch,
)
from disagg.connector.handoff.producer_worker import ProducerWorker
from disagg.connector.handoff.rank import RankCache, WorkerRank
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.errors import TransferError
from disagg.transport.blocks import BlockCache, Region
from disagg.transport.control.client import Endpoint, Peers
from disagg.transport.registry import Means, make_receivers

SECRET, FINGERPRINT = b"0" * 32, {"model": "tiny"}
BLOCKS, KV_HEADS, TOKENS, CONTENT, LAYERS = 8, 2, 4, 16, 2
LEASE, LEASE_S = 0, 60.0
THEIRS, OURS = [1, 3], [6, 5]
BLOCK_BYTES = TOKENS * CONTENT
"""Of one head of one layer."""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Producer:
    """One rank, and how its leases ended."""

    def __init__(self, worker: ProducerWorker) -> None:
        self.worker, self._ended = worker, list[tuple[str, str]]()
        worker.start(StepWork(grants=[Grant(LEASE, "prefill", THEIRS, LEASE_S)]))

    @property
    def ended(self) -> list[str]:
        """Outcomes."""
        self._ended += self.worker.take_ended()
        return [outcome for _, outcome in self._ended]


class Consumer:
    """One rank, its cache, and what it reported."""

    def __init__(self, worker: ConsumerWorker, cache: RankCache) -> None:
        self.worker, self.cache, self._reports = worker, cache, dict[str, LoadReport]()

    def loads(self, *loads: HandoffLoad) -> None:
        self.worker.start(StepWork(loads=list(loads)))

    def report(self, name: str = "r") -> LoadReport:
        """Of a request whose load ends."""

        def is_there() -> bool:
            self._reports |= {report.request_id: report for report in self.worker.take_ended()}
            return name in self._reports

        until(is_there)
        return self._reports[name]


class Engines:
    """Makes the ranks of a producer and of a consumer of one model. All layers of all heads are in
    `whole`: [layers, blocks, heads, tokens, bytes]."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.settings = ConnectorSettings(transports=["tcp"], storage_path=folder, load_threads=1)
        self.means = Means("127.0.0.1", SECRET, self.settings.storage(SECRET))
        self.stack = stack
        shape = (LAYERS, BLOCKS, KV_HEADS, TOKENS, CONTENT)
        self.whole = torch.randint(1, 256, shape, dtype=torch.uint8)

    def part(self, rank: WorkerRank) -> torch.Tensor:
        """The layers and heads of one rank."""
        heads = sharding.held(rank.world_size, rank.rank, KV_HEADS)
        each = LAYERS // rank.stages
        layers = slice(rank.stage * each, (rank.stage + 1) * each)
        return self.whole[layers, :, slice(*heads)].clone()

    def cache(self, rank: WorkerRank, part: torch.Tensor) -> RankCache:
        names = [f"layer {rank.stage * len(part) + number}" for number in range(len(part))]
        regions = [Region(name, of, "U8") for name, of in zip(names, part, strict=True)]
        return RankCache(BlockCache(regions), tuple(names), FINGERPRINT, None)

    def produces(self, tensor: int = 1, stages: int = 1) -> list[Producer]:
        found = []
        for rank in ranks(tensor, stages):
            cache = self.cache(rank, self.part(rank))
            worker = ProducerWorker(self.settings, rank, cache, self.means)
            self.stack.callback(worker.close)
            found.append(Producer(worker))
        return found

    def consumes(self, tensor: int = 1, stages: int = 1, **changed: Any) -> list[Consumer]:
        """changed: fields of their caches."""
        found = []
        for rank in ranks(tensor, stages):
            cache = replace(self.cache(rank, torch.zeros_like(self.part(rank))), **changed)
            receivers = make_receivers(self.settings.transports, cache.blocks, self.means)
            peers = Peers("engine", FINGERPRINT, SECRET)
            worker = ConsumerWorker(self.settings, rank, cache, peers, receivers)
            self.stack.callback(worker.close)
            found.append(Consumer(worker, cache))
        return found


def ranks(tensor: int, stages: int) -> Iterator[WorkerRank]:
    for stage in range(stages):
        for rank in range(tensor):
            yield WorkerRank("engine", rank, tensor, stage, stages, KV_HEADS)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(tmp_path, stack)


def endpoints(producers: Sequence[Producer]) -> list[Endpoint]:
    return [producer.worker.endpoint for producer in producers]


def load(producers: Sequence[Producer], name: str = "r", **more: Any) -> HandoffLoad:
    """Of both blocks, all layers on one stage of each side."""
    values: dict[str, Any] = {
        "request_id": name,
        "lease": LEASE,
        "endpoints": endpoints(producers),
        "layers": ([LAYERS], [LAYERS]),
        "unit": TOKENS,
        "spans": ((0, len(THEIRS)),),
        "first": 0,
        "block_ids": OURS,
    }
    return HandoffLoad(**{**values, **more})


def stages_of(count: int) -> list[int]:
    return [LAYERS // count] * count


@pytest.mark.parametrize(
    ("theirs", "ours", "outcomes"),
    [
        # Tensor parallel ranks and pipeline stages, and how the lease ends on each producer rank.
        ((1, 1), (1, 1), ["fetched"]),
        ((2, 1), (1, 1), ["fetched", "fetched"]),
        ((1, 1), (2, 1), ["fetched"]),
        ((1, 2), (1, 1), ["fetched", "fetched"]),
        ((1, 1), (1, 2), ["fetched"]),
        # Replicas that no rank reads.
        ((4, 1), (1, 1), ["fetched", "aborted", "fetched", "aborted"]),
        ((4, 1), (2, 1), ["fetched", "aborted", "aborted", "fetched"]),
    ],
)
def test_all_ranks_get_their_heads_and_layers_and_no_lease_is_left(
    engines: Engines, theirs: tuple[int, int], ours: tuple[int, int], outcomes: list[str]
) -> None:
    producers, consumers = engines.produces(*theirs), engines.consumes(*ours)
    layers = stages_of(theirs[1]), stages_of(ours[1])
    for consumer, rank in zip(consumers, ranks(*ours), strict=True):
        consumer.loads(load(producers, layers=layers))
        report = consumer.report()
        wanted = engines.part(rank)
        moved = 2 * BLOCK_BYTES * len(wanted) * wanted.shape[2]
        assert (report.outcome, report.transport) == ("loaded", "tcp")
        assert (report.num_bytes, report.reason) == (moved, None)
        assert report.seconds > 0
        for region, layer in zip(consumer.cache.blocks.regions, wanted, strict=True):
            assert region.memory[OURS].equal(layer[THEIRS])
            assert not region.memory[:5].any()
    until(lambda: [producer.ended for producer in producers] == [[one] for one in outcomes])


def test_ranks_divide_messages_among_them(engines: Engines) -> None:
    """Each of the producer's ranks hears of a release and of a renewal once."""
    producers, consumers = engines.produces(4), engines.consumes(2)
    now = time.monotonic()
    for producer in producers:
        producer.worker._leases._clock = lambda: now + LEASE_S / 2
    message = LeaseMessage(LEASE, endpoints(producers))

    def renewed() -> list[bool]:
        leases = [producer.worker._leases._leases[LEASE] for producer in producers]
        return [lease.deadline > now + LEASE_S + 1 for lease in leases]

    for number, consumer in enumerate(consumers):
        consumer.worker.start(StepWork(renewals=[message]))
        until(lambda: sum(renewed()) == 2 * number + 2)  # noqa: B023
    assert not any(producer.ended for producer in producers)
    for number, consumer in enumerate(consumers):
        consumer.worker.start(StepWork(releases=[message]))
        until(lambda: sum(one.ended == ["aborted"] for one in producers) == 2 * number + 2)  # noqa: B023


def test_loads_that_are_cancelled(engines: Engines) -> None:
    """One is being loaded, the other waits for its thread. Both are reported when they ended."""
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    leases = producer.worker._leases
    leases.grant(1, "other", THEIRS, LEASE_S)
    with leases._changed:
        consumer.loads(load([producer]), load([producer], "waits", lease=1))
        peers = consumer.worker._loads._peers
        until(lambda: all(len(peer.waiting) == 1 and not peer.idle for peer in peers.values()))
        consumer.worker.start(StepWork(cancels=["r", "waits", "never seen"]))
        assert consumer.worker.take_ended() == []
    assert consumer.report("r").outcome == "aborted"
    assert consumer.report("waits") == LoadReport("waits", "aborted", "none", 0, 0.0)
    assert consumer.worker._cancelled == {}
    until(lambda: producer.ended == ["fetched", "aborted"])


def breaks_off(
    engines: Engines, producer: Producer, consumer: Consumer, *, dies: bool = True
) -> None:
    """A load of a prompt whose producer dies while it is computed, or whose lease ends. An answer
    has confirmed its first block; the second came after the last answer."""
    leases, growth = producer.worker._leases, (SpanGrowth(0, TOKENS, TOKENS),)
    leases.grow(1, "followed", b"stream", b"prompt", len(THEIRS))
    leases.extend(1, 0, [(0, THEIRS[:1])], TOKENS)
    grows = load([producer], lease=-1, stream=b"stream", prompt=b"prompt", growth=growth)
    consumer.loads(grows)
    until(consumer.worker.follower.take_moved)
    leases.extend(1, 0, [(1, THEIRS[1:])], 2 * TOKENS)
    until(consumer.worker.follower.take_moved)
    if dies:
        producer.worker.close()
    else:
        leases.stop(1)
    until(lambda: not consumer.worker._ended.empty())
    for region, layer in zip(consumer.cache.blocks.regions, engines.whole, strict=True):
        assert region.memory[OURS].equal(layer[THEIRS])


def test_what_came_before_a_prompt_began_anew_is_not_counted(engines: Engines) -> None:
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    stream, prompt, lease = b"s" * 16, b"prompt", LEASE + 1
    leases = producer.worker._leases
    leases.grow(lease, "grows", stream, prompt, len(THEIRS))
    leases.extend(lease, 0, [(0, THEIRS[:1])], TOKENS)
    growth = (SpanGrowth(0, TOKENS, TOKENS),)
    consumer.loads(load([producer], stream=stream, prompt=prompt, growth=growth))
    until(lambda: consumer.worker.follower.take_moved() == ["r"])
    with leases._changed:  # no news between the two
        leases.begin_anew(lease, 1)
        leases.grant(lease, "grows", THEIRS, LEASE_S)
    report = consumer.report()
    assert (report.outcome, report.hidden_bytes) == ("loaded", 0)
    assert report.num_bytes == len(THEIRS) * BLOCK_BYTES * LAYERS * KV_HEADS
    for region, layer in zip(consumer.cache.blocks.regions, engines.whole, strict=True):
        assert region.memory[OURS].equal(layer[THEIRS])


def test_a_load_that_breaks_off_keeps_what_an_answer_has_confirmed(engines: Engines) -> None:
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    breaks_off(engines, producer, consumer)
    report = consumer.report()
    assert (report.outcome, report.reason, report.invalid) == ("failed", "peer_lost", (OURS[1],))


def test_a_load_whose_lease_ends_keeps_nothing(engines: Engines) -> None:
    """The producer may have been reset, for new weights."""
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    breaks_off(engines, producer, consumer, dies=False)
    report = consumer.report()
    assert (report.outcome, report.reason, report.invalid) == ("failed", "lease_gone", ())


def test_a_load_that_breaks_off_keeps_nothing_if_it_is_cancelled(engines: Engines) -> None:
    """Perhaps by a reset, after it ended and before that was reported."""
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    breaks_off(engines, producer, consumer)
    consumer.worker.start(StepWork(cancels=["r"]))
    report = consumer.report()
    assert (report.outcome, report.invalid) == ("failed", ())


def test_a_load_that_was_refused_is_reported_as_failed(engines: Engines) -> None:
    (consumer,) = engines.consumes()
    consumer.loads(load([], problem="role", layers=([], [])))
    assert consumer.report() == LoadReport("r", "failed", "none", 0, 0.0, "role")


def test_when_one_rank_fails_the_others_need_not_wait_for_its_lease(engines: Engines) -> None:
    producers, (consumer,) = engines.produces(2), engines.consumes()
    producers[0].worker._leases.release(LEASE, "aborted")
    consumer.loads(load(producers))
    assert consumer.report() == LoadReport("r", "failed", "none", 0, 0.0, "lease_gone")
    until(lambda: producers[1].ended == ["aborted"])


def test_without_a_fence_nothing_is_loaded(engines: Engines) -> None:
    """Steps that still run may write to the blocks."""
    producers = engines.produces(2)

    def model_fence() -> None:
        raise TransferError("the device failed", reason="device")

    staging = SimpleNamespace(device=SimpleNamespace(model_fence=model_fence))
    (consumer,) = engines.consumes(staging=staging)
    consumer.loads(load(producers))
    assert consumer.report() == LoadReport("r", "failed", "none", 0, 0.0, "device")
    until(lambda: [producer.ended for producer in producers] == [["aborted"]] * 2)


def test_layers_that_differ_in_their_heads_are_not_sliced(engines: Engines) -> None:
    """As those of a draft model with other heads than its target's."""
    producers, uneven = engines.produces(2), engines.whole[0, :, :1].clone()
    regions = [Region("layer 0", engines.whole[0].clone(), "U8"), Region("layer 1", uneven, "U8")]
    (consumer,) = engines.consumes(blocks=BlockCache(regions))
    consumer.loads(load(producers))
    report = LoadReport("r", "failed", "none", 0, 0.0, "tensor_parallel_size")
    assert consumer.report() == report
    until(lambda: [producer.ended for producer in producers] == [["aborted"]] * 2)


def test_a_producer_that_is_gone_ends_nothing_else(engines: Engines) -> None:
    (gone,), (well,), (consumer,) = engines.produces(), engines.produces(), engines.consumes()
    gone.worker.close()
    for producer in (gone, well):
        message = LeaseMessage(LEASE, endpoints([producer]))
        consumer.worker.start(StepWork(releases=[message], renewals=[message]))
    consumer.loads(load([gone]))
    assert consumer.report().outcome == "failed"
    until(lambda: well.ended == ["aborted"])


def test_closed(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection stays, and no thread waits for work."""
    monkeypatch.setattr(per_peer_threads, "_IDLE_S", 600.0)
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    worker = consumer.worker
    consumer.loads(load([producer]))
    worker.start(StepWork(renewals=[LeaseMessage(LEASE, endpoints([producer]))]))
    peers = [next(iter(of._peers.values())) for of in (worker._loads, worker._lease_messages)]
    until(lambda: all(peer.idle == 1 for peer in peers))
    assert any(worker._peers._idle.values())
    worker.close()
    assert worker._peers._idle == {}
    until(lambda: not any(peer.threads for peer in peers))


# ---- leases that grow --------------------------------------------------------------------------


STREAM, PROMPT, GROWS = b"s" * 16, b"p" * 16, 1
ANEW = [2, 4]
"""The blocks of the request after it lost those before."""


class Prompt:
    """It is computed on all ranks of a producer, under lease GROWS."""

    def __init__(self, producers: Sequence[Producer]) -> None:
        self.producers, self.epoch = producers, 0

    def _step(self, **work: Any) -> None:
        for producer in self.producers:
            producer.worker.start(StepWork(**work))

    def begins(self) -> None:
        self._step(growing=[Growing(GROWS, "computed", STREAM, PROMPT, len(THEIRS))])

    def grows(self, block: int, blocks: Sequence[int] = THEIRS) -> None:
        """Up to the end of its first or second block."""
        found = [(block, [blocks[block]])]
        self._step(grown=[Grown(GROWS, self.epoch, (block + 1) * TOKENS, found)])

    def begins_anew(self) -> None:
        self.epoch += 1
        self._step(grown=[Grown(GROWS, self.epoch, 0, [])])

    def ends(self) -> None:
        self._step(stopped=[GROWS])

    def is_granted(self, blocks: Sequence[int] = THEIRS) -> None:
        self._step(grants=[Grant(GROWS, "computed", list(blocks), LEASE_S)])


def follow(producers: Sequence[Producer], **more: Any) -> HandoffLoad:
    growth = (SpanGrowth(0, TOKENS, TOKENS),)
    return load(producers, lease=-1, stream=STREAM, prompt=PROMPT, growth=growth, **more)


def moves(consumer: Consumer) -> None:
    """Wait until its load has got on since the last time."""
    until(lambda: consumer.worker.follower.take_moved() == ["r"])


def is_right(consumer: Consumer, wanted: torch.Tensor, theirs: Sequence[int] = THEIRS) -> bool:
    """wanted: of its rank."""
    return all(
        bool(region.memory[OURS].equal(layer[list(theirs)]))
        for region, layer in zip(consumer.cache.blocks.regions, wanted, strict=True)
    )


@pytest.mark.parametrize("transport", ["tcp", "process_memory"])
@pytest.mark.parametrize(
    ("theirs", "ours", "outcomes"),
    [
        ((1, 1), (1, 1), ["fetched"]),
        ((2, 1), (1, 1), ["fetched", "fetched"]),
        ((1, 1), (2, 1), ["fetched"]),
        ((1, 2), (1, 1), ["fetched", "fetched"]),
        ((4, 1), (1, 1), ["fetched", "aborted", "fetched", "aborted"]),
    ],
)
def test_all_ranks_follow_and_no_lease_is_left(
    engines: Engines,
    transport: str,
    theirs: tuple[int, int],
    ours: tuple[int, int],
    outcomes: list[str],
) -> None:
    engines.settings = engines.settings.model_copy(update={"transports": [transport]})
    producers, consumers = engines.produces(*theirs), engines.consumes(*ours)
    prompt, layers = Prompt(producers), (stages_of(theirs[1]), stages_of(ours[1]))
    Prompt(producers[:1]).begins()
    for consumer in consumers:
        consumer.loads(follow(producers, layers=layers))
    if producers[1:]:
        time.sleep(0.1)  # the others come to the step while the load waits for them
        Prompt(producers[1:]).begins()
    # One rank is done with the step before the others are.
    for number, producer in enumerate(producers):
        if number < 2:
            assert all(consumer.worker.follower.take_moved() == [] for consumer in consumers)
        Prompt([producer]).grows(0)
    for consumer in consumers:
        moves(consumer)
        assert consumer.worker.take_ended() == []
    prompt.is_granted()
    for consumer, rank in zip(consumers, ranks(*ours), strict=True):
        report, wanted = consumer.report(), engines.part(rank)
        moved = 2 * BLOCK_BYTES * len(wanted) * wanted.shape[2]
        assert (report.outcome, report.transport) == ("loaded", transport)
        assert (report.num_bytes, report.hidden_bytes) == (moved, moved // 2)
        assert (report.reason, report.invalid) == (None, ())
        assert is_right(consumer, wanted)
        assert not any(region.memory[:5].any() for region in consumer.cache.blocks.regions)
        assert (len(consumer.worker._cancelled), len(consumer.worker.follower.right)) == (0, 0)
    until(lambda: [producer.ended for producer in producers] == [[one] for one in outcomes])


def test_a_prompt_that_begins_anew_is_fetched_anew(engines: Engines) -> None:
    """Its first blocks are others', with other contents, before the producer says so."""
    producers, (consumer,) = engines.produces(2), engines.consumes()
    prompt = Prompt(producers)
    prompt.begins()
    consumer.loads(follow(producers))
    prompt.grows(0)
    moves(consumer)
    prompt.begins_anew()
    prompt.grows(0, ANEW)
    moves(consumer)
    prompt.is_granted(ANEW)
    report = consumer.report()
    assert (report.outcome, report.num_bytes) == ("loaded", 2 * BLOCK_BYTES * LAYERS * KV_HEADS)
    assert report.hidden_bytes == report.num_bytes // 2
    assert is_right(consumer, engines.part(next(ranks(1, 1))), ANEW)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_what_came_of_a_prompt_that_ends_is_kept(
    engines: Engines, strict: bool, tensor: int
) -> None:
    """As far as a later answer has proved it. Of several ranks, one may not have been asked. Its
    producer is gone; where the lease alone ends, nothing is kept."""
    engines.settings = engines.settings.model_copy(update={"strict": strict})
    producers, (consumer,) = engines.produces(tensor), engines.consumes()
    prompt = Prompt(producers)
    prompt.begins()
    consumer.loads(follow(producers))
    for block in (0, 1):
        prompt.grows(block)
        moves(consumer)
    for producer in producers:
        producer.worker.close()
    report = consumer.report()
    assert (report.outcome, report.reason, report.num_bytes) == ("failed", "peer_lost", 0)
    assert report.invalid == (() if strict or tensor > 1 else (OURS[1],))
    assert consumer.worker.follower.right == {}


def test_blocks_of_two_sizes(engines: Engines) -> None:
    """One of ours takes two of theirs. The cache has the first unit of the load's first block."""
    (producer,) = engines.produces()
    memory = torch.zeros((LAYERS, BLOCKS, KV_HEADS, 2 * TOKENS, CONTENT), dtype=torch.uint8)
    regions = [Region(f"layer {at}", of, "U8") for at, of in enumerate(memory)]
    (consumer,) = engines.consumes(blocks=BlockCache(regions))
    work = Growing(GROWS, "computed", STREAM, PROMPT, 4)
    producer.worker.start(StepWork(growing=[work]))
    consumer.loads(
        follow([producer], spans=((1, 4),), first=1, block_ids=[6, 5], unit=TOKENS, per_block=2)
    )
    for block, theirs in enumerate([1, 3, 7]):
        grown = Grown(GROWS, 0, (block + 1) * TOKENS, [(block, [theirs])])
        producer.worker.start(StepWork(grown=[grown]))
        if block:
            moves(consumer)
    assert consumer.worker.follower.right == {"r": 1}
    producer.worker.start(StepWork(grants=[Grant(GROWS, "computed", [1, 3, 7, 2], LEASE_S)]))
    assert consumer.report().outcome == "loaded"
    whole = engines.whole.transpose(1, 2)[:, :, [3, 7, 2]].flatten(2, 3)
    found = memory.transpose(1, 2)[:, :, [6, 5]].flatten(2, 3)
    assert found[:, :, TOKENS:].equal(whole)
    assert not found[:, :, :TOKENS].any()


def test_of_a_prompt_that_began_anew_nothing_is_kept(engines: Engines) -> None:
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    prompt = Prompt([producer])
    prompt.begins()
    consumer.loads(follow([producer]))
    for block in (0, 1):
        prompt.grows(block)
        moves(consumer)
    assert consumer.worker.follower.right == {"r": 1}
    prompt.begins_anew()
    until(lambda: consumer.worker.follower.right == {})
    prompt.ends()
    assert consumer.report().invalid == ()


@pytest.mark.parametrize("fetched", [0, 1])
def test_a_load_that_is_cancelled_while_it_waits(engines: Engines, fetched: int) -> None:
    """Its producer hears that nobody wants the prompt's blocks any more."""
    producers, (consumer,) = engines.produces(2), engines.consumes()
    prompt = Prompt(producers)
    prompt.begins()
    consumer.loads(follow(producers))
    for block in range(fetched):
        prompt.grows(block)
        moves(consumer)
    consumer.worker.start(StepWork(cancels=["r"]))
    assert consumer.report() == LoadReport("r", "aborted", "none", 0, 0.0)
    prompt.is_granted()
    until(lambda: [producer.ended for producer in producers] == [["aborted"]] * 2)
    assert (len(consumer.worker._cancelled), len(consumer.worker.follower.right)) == (0, 0)


def test_a_prompt_that_began_anew_has_a_short_time_to_get_on(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine lacks room, perhaps because of this very load's blocks at ours."""
    monkeypatch.setattr(follower, "_ANEW_S", 0.3)
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    prompt = Prompt([producer])
    prompt.begins()
    consumer.loads(follow([producer]))
    prompt.grows(0)
    moves(consumer)
    prompt.begins_anew()
    report = consumer.report()
    assert (report.outcome, report.reason, report.invalid) == ("failed", "deadline", ())
    prompt.is_granted(ANEW)
    until(lambda: producer.ended == ["aborted"])


def test_loads_that_wait_for_prompts_hold_up_no_others(engines: Engines) -> None:
    """The engine has one thread for the other loads."""
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    prompt = Prompt([producer])
    prompt.begins()
    more = [follow([producer], name=f"f{number}") for number in range(10)]
    consumer.loads(*more, load([producer]))
    assert consumer.report("r").outcome == "loaded"
    assert len(consumer.worker._cancelled) == 10
    prompt.ends()
    assert [consumer.report(one.request_id).reason for one in more] == ["lease_gone"] * 10


def test_a_stream_that_is_not_there_is_not_loaded(engines: Engines) -> None:
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    for number, (stream, reason) in enumerate(((b"t" * 16, "lease_gone"), (STREAM, "refused"))):
        Prompt([producer]).begins()
        other = replace(follow([producer], name=f"r{number}"), stream=stream)
        if reason == "refused":
            consumer.worker._cache = replace(consumer.cache, layers=("layer 0", "another"))
        consumer.loads(other)
        assert consumer.report(f"r{number}") == LoadReport(
            f"r{number}", "failed", "none", 0, 0.0, reason
        )
    Prompt([producer]).is_granted()
    until(lambda: producer.ended == ["aborted"])


def watch(producer: Producer, name: str = "r", prompt: bytes = PROMPT) -> Watch:
    return Watch(name, producer.worker.endpoint, STREAM, prompt)


def begun(consumer: Consumer) -> BegunReport:
    found = list[BegunReport]()
    until(lambda: found.extend(consumer.worker.take_begun()) or found)
    (report,) = found
    return report


def test_a_stream_is_watched_until_it_begins(engines: Engines) -> None:
    """By the first rank alone."""
    producers, consumers = engines.produces(2), engines.consumes(2)
    for consumer in consumers:
        consumer.worker.start(StepWork(watches=[watch(producers[0])]))
    assert consumers[0].worker.take_begun() == []
    Prompt(producers).begins()
    assert begun(consumers[0]) == BegunReport("r")
    assert consumers[0].worker._unwatched == consumers[1].worker._unwatched == {}
    assert consumers[1].worker.take_begun() == []
    consumers[0].worker.start(StepWork(unwatched=["r"]))


def test_a_stream_that_never_begins(engines: Engines) -> None:
    """Nobody computes it, it is another prompt's, its producer is gone, or it takes too long."""
    (producer,), (gone,), (consumer,) = engines.produces(), engines.produces(), engines.consumes()
    gone.worker.close()
    consumer.worker.start(StepWork(watches=[watch(gone)]))
    assert begun(consumer) == BegunReport("r", "peer_lost")
    consumer.worker.start(StepWork(watches=[watch(producer)]))
    producer.worker.start(StepWork(unwanted=[STREAM]))
    assert begun(consumer) == BegunReport("r", "lease_gone")
    producer.worker._leases._past.clear()
    Prompt([producer]).begins()
    consumer.worker.start(StepWork(watches=[watch(producer, prompt=b"q" * 16)]))
    assert begun(consumer) == BegunReport("r", "prompt_mismatch")
    Prompt([producer]).ends()
    producer.worker._leases._past.clear()
    engines.settings = engines.settings.model_copy(update={"lease_limit_s": 0.15})
    (hasty,) = engines.consumes()
    hasty.worker.start(StepWork(watches=[watch(producer)]))
    assert begun(hasty) == BegunReport("r", "deadline")


def test_a_stream_that_prefill_never_hears_of(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up soon; one whose prompt waits is not."""
    monkeypatch.setattr(consumer_worker, "_UNHEARD_S", 0.2)
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    producer.worker.start(StepWork(queued=[STREAM]))
    consumer.worker.start(StepWork(watches=[watch(producer, "waits")]))
    consumer.worker.start(StepWork(watches=[replace(watch(producer), stream=b"t" * 16)]))
    assert begun(consumer) == BegunReport("r", "lease_gone")
    assert consumer.worker._unwatched.keys() == {"waits"}
    Prompt([producer]).begins()
    assert begun(consumer) == BegunReport("waits")


def test_who_does_not_watch_any_more_is_not_kept(engines: Engines) -> None:
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    consumer.worker.start(StepWork(watches=[watch(producer, name) for name in "ab"]))
    consumer.worker.start(StepWork(unwatched=["a", "never seen"]))
    assert begun(consumer) == BegunReport("a")
    assert consumer.worker._unwatched.keys() == {"b"}
    consumer.worker.close()
    until(lambda: not any(peer.threads for peer in consumer.worker._watches._peers.values()))


def test_a_load_does_not_wait_for_prompts_that_are_not_begun(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many those are. Prefill may lack the blocks that the load frees."""
    monkeypatch.setattr(consumer_worker, "_FOLLOWS", 1)
    (producer,), (consumer,) = engines.produces(), engines.consumes()
    other = replace(watch(producer, "other"), stream=b"t" * 16)
    consumer.worker.start(StepWork(watches=[other]))
    prompt = Prompt([producer])
    prompt.begins()
    prompt.is_granted()
    consumer.loads(follow([producer]))
    assert consumer.report().outcome == "loaded"
    assert consumer.worker._unwatched.keys() == {"other"}
    consumer.worker.start(StepWork(unwatched=["other"]))
    assert begun(consumer) == BegunReport("other")


def test_a_stream_is_renewed_and_released_by_its_name(engines: Engines) -> None:
    producers, (consumer,) = engines.produces(2), engines.consumes()
    prompt, now = Prompt(producers), time.monotonic()
    prompt.begins()
    prompt.is_granted()
    for producer in producers:
        producer.worker._leases._clock = lambda: now + LEASE_S / 2
    message = LeaseMessage(-1, endpoints(producers), STREAM)
    leases = [producer.worker._leases._leases for producer in producers]
    consumer.worker.start(StepWork(renewals=[message]))
    until(lambda: all(one[GROWS].deadline > now + LEASE_S + 1 for one in leases))
    assert not any(one[LEASE].deadline > now + LEASE_S + 1 for one in leases)
    consumer.worker.start(StepWork(releases=[message]))
    until(lambda: [producer.ended for producer in producers] == [["aborted"]] * 2)
    assert [one.keys() for one in leases] == [{LEASE}] * 2
