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

from disagg.connector.handoff import per_peer_threads, sharding
from disagg.connector.handoff.consumer_worker import ConsumerWorker
from disagg.connector.handoff.messages import (
    Grant,
    HandoffLoad,
    LeaseMessage,
    LoadReport,
    SpanGrowth,
    StepWork,
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
            receivers = make_receivers(["tcp"], cache.blocks, self.means)
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
    until(consumer.worker.take_moved)
    leases.extend(1, 0, [(1, THEIRS[1:])], 2 * TOKENS)
    until(consumer.worker.take_moved)
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
    until(lambda: consumer.worker.take_moved() == ["r"])
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
