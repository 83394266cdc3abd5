"""Every transport moves exactly the blocks asked for, whatever their number, shape and size."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from transport import caches
from transport.caches import Shape
from transport.pairs import MakePair, Start
from transport.worker import Order, wait_until

from disagg.errors import LeaseGone, PeerLost, PeerRefused, TransferError
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob
from disagg.transport.blocks import Selection
from disagg.transport.deadline import Deadline

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([], []),
        ([7], [3]),
        ([0, 1, 2, 3], [10, 11, 12, 13]),
        ([9, 4, 5, 6, 23], [0, 2, 1, 20, 19]),
        (list(range(24)), list(reversed(range(24)))),
    ],
    ids=["none", "one", "a-run", "any-order", "all"],
)
def test_blocks(make_pair: MakePair, sources: list[int], targets: list[int]) -> None:
    pair = make_pair()
    pair.producer.call("grant", 0, sources)
    moved = pair.fetch(0, targets)
    assert moved.num_bytes == len(sources) * 3 * 2 * 8 * 64
    assert moved.transport == pair.producer.setup.transport
    assert pair.is_right(sources, targets)
    assert caches.untouched(pair.consumer.cache, but=targets)
    assert pair.nothing_held()
    assert pair.producer.call("outcome", 0) == "fetched"


@pytest.mark.parametrize(
    "shape",
    [
        Shape(blocks=1, heads=1, tokens=1, content=1, layers=1),
        Shape(blocks=3, heads=1, tokens=1, content=3, layers=1),
        Shape(blocks=16, heads=2, tokens=16, content=64, layers=2),
        Shape(blocks=1024, heads=2, tokens=16, content=128, layers=16),
        Shape(blocks=64, heads=8, tokens=128, content=256, layers=16),
        pytest.param(
            Shape(blocks=256, heads=8, tokens=128, content=256, layers=16), marks=pytest.mark.slow
        ),
    ],
    ids=["1B", "9B", "64KiB", "64MiB", "256MiB", "1GiB"],
)
def test_sizes(make_pair: MakePair, shape: Shape) -> None:
    pair = make_pair(shape)
    sources, targets = list(range(shape.blocks)), list(range(shape.blocks))
    random.Random(1).shuffle(targets)
    pair.producer.call("grant", 0, sources)
    moved = pair.fetch(0, targets, seconds=60)
    assert moved.num_bytes == pair.consumer.cache.block_bytes * shape.blocks
    assert pair.is_right(sources, targets)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_heads_and_units(make_pair: MakePair, layout: str) -> None:
    """Two of four heads and an odd number of half blocks: pieces of some hundred bytes, more of
    them than one system call takes."""
    shape = Shape(blocks=70, heads=4, layout=layout)
    pair = make_pair(shape)
    sources, targets = list(range(5, 65)), list(range(69, 9, -1))
    pair.producer.call("grant", 0, sources)
    part, mine = p.Part(4, ((3, 118),), (1, 3)), Selection(targets, 4, 1, 115, (2, 4))
    moved = pair.consumer.fetch(Order(pair.producer.endpoint, 0, part, mine))
    assert moved.num_bytes == 115 * 4 * 2 * 64 * 3
    for index in range(shape.layers):
        sent = caches.tokens(pair.original(), index, sources)[12:472, 1:3]
        got = caches.tokens(pair.consumer.cache, index, targets)
        assert got[4:464, 2:4].equal(sent)
        assert bool((got[:, :2] == caches.POISON).all())
        assert bool((got[:4] == caches.POISON).all())
        assert bool((got[464:] == caches.POISON).all())
    assert caches.untouched(pair.consumer.cache, but=targets)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLNHC"])
def test_two_producer_ranks_into_one(start: Start, layout: str) -> None:
    one, both = Shape(heads=1, layout=layout), Shape(heads=2, layout=layout)
    ranks = [start(one, remote=True, empty=False) for _ in range(2)]
    consumer = start(both, remote=False, empty=True)
    sources, targets = [4, 9, 2], [20, 1, 2]
    for head, rank in enumerate(ranks):
        rank.call("grant", 0, sources)
        mine = Selection(targets, 8, 0, 3, (head, head + 1))
        consumer.fetch(Order(rank.endpoint, 0, p.Part(8, ((0, 3),), (0, 1)), mine))
    for index in range(one.layers):
        got = caches.tokens(consumer.cache, index, targets)
        for head, rank in enumerate(ranks):
            sent = caches.tokens(caches.make(one, rank.setup.seed), index, sources)
            assert got[:, head].equal(sent[:, 0])
    assert caches.untouched(consumer.cache, but=targets)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLNHC"])
def test_one_producer_rank_into_two(start: Start, layout: str) -> None:
    one, both = Shape(heads=1, layout=layout), Shape(heads=2, layout=layout)
    producer = start(both, remote=True, empty=False)
    producer.call("grant", 0, [4, 9, 2])
    original = caches.make(both, producer.setup.seed)
    for head in range(2):
        assert producer.call("outcome", 0) is None, "the other rank has not fetched yet"
        consumer = start(one, remote=False, empty=True)
        part, mine = p.Part(8, ((0, 3),), (head, head + 1)), consumer.cache.whole([20, 1, 2])
        consumer.fetch(Order(producer.endpoint, 0, part, mine, readers=2))
        for index in range(one.layers):
            got = caches.tokens(consumer.cache, index, [20, 1, 2])
            assert got[:, 0].equal(caches.tokens(original, index, [4, 9, 2])[:, head])


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_two_producer_stages_into_one(start: Start, layout: str) -> None:
    """One after the other, each with some of the layers."""
    stages = [Shape(layers=2, layout=layout), Shape(layers=3, first=2, layout=layout)]
    ranks = [start(stage, remote=True, empty=False) for stage in stages]
    consumer = start(Shape(layers=5, layout=layout), remote=False, empty=True)
    sources, targets = [4, 9, 2], [20, 1, 2]
    for stage, rank in zip(stages, ranks, strict=True):
        rank.call("grant", 0, sources)
        regions = stage.first, stage.first + stage.layers
        mine = Selection(targets, 8, 0, 3, None, regions)
        part = p.Part(8, ((0, 3),), None, (0, stage.layers))
        moved = consumer.fetch(Order(rank.endpoint, 0, part, mine))
        assert moved.num_bytes == stage.layers * 3 * 2 * 8 * 64
        for index in range(*regions):
            original = caches.make(stage, rank.setup.seed)
            sent = caches.tokens(original, index - stage.first, sources)
            assert caches.tokens(consumer.cache, index, targets).equal(sent)
        for index in range(regions[1], 5):
            assert bool((consumer.cache.regions[index].memory == caches.POISON).all())
    assert caches.untouched(consumer.cache, but=targets)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_one_producer_stage_into_two(start: Start, layout: str) -> None:
    """Of each of its heads too: a consumer of two stages and two ranks."""
    whole = Shape(layers=5, layout=layout)
    producer = start(whole, remote=True, empty=False)
    producer.call("grant", 0, [4, 9, 2])
    original = caches.make(whole, producer.setup.seed)
    for first, layers in ((0, 2), (2, 3)):
        for head in range(2):
            assert producer.call("outcome", 0) is None, "other ranks have not fetched yet"
            shape = Shape(layers=layers, first=first, heads=1, layout=layout)
            consumer = start(shape, remote=False, empty=True)
            part = p.Part(8, ((0, 3),), (head, head + 1), (first, first + layers))
            mine = Selection([20, 1, 2], 8, 0, 3, (0, 1), (0, layers))
            consumer.fetch(Order(producer.endpoint, 0, part, mine, readers=4))
            for index in range(layers):
                got = caches.tokens(consumer.cache, index, [20, 1, 2])
                sent = caches.tokens(original, first + index, [4, 9, 2])
                assert got[:, 0].equal(sent[:, head])
            assert caches.untouched(consumer.cache, but=[20, 1, 2])


def test_other_layers_than_there_are(start: Start) -> None:
    """Whoever takes another stage's layers for its own reads nothing, and keeps nothing."""
    producer = start(Shape(layers=2, first=1), remote=True, empty=False)
    consumer = start(Shape(layers=2), remote=False, empty=True)
    for lease, regions in enumerate([(0, 2), (0, 1), (1, 3)]):
        producer.call("grant", lease, [4])
        part = p.Part(8, ((0, 1),), None, regions)
        order = Order(producer.endpoint, lease, part, consumer.cache.whole([1]))
        with pytest.raises(PeerRefused, match="layers differ: "):
            consumer.fetch(order)
        assert wait_until(lambda lease=lease: producer.call("outcome", lease) == "aborted", 2)
    assert caches.untouched(consumer.cache, but=[])


@pytest.mark.parametrize(("theirs", "ours"), [(16, 4), (4, 16), (12, 8)])
def test_block_sizes_that_differ(make_pair: MakePair, theirs: int, ours: int) -> None:
    pair = make_pair(Shape(tokens=theirs), Shape(tokens=ours))
    unit = 4
    sources, targets = [5, 3, 8, 1, 0, 9], [9, 8, 2, 1, 11, 0]
    count = min(6 * theirs, 6 * ours) // unit - 1
    pair.producer.call("grant", 0, sources)
    part, mine = p.Part(unit, ((1, 1 + count),)), Selection(targets, unit, 0, count)
    pair.consumer.fetch(Order(pair.producer.endpoint, 0, part, mine))
    for index in range(3):
        sent = caches.tokens(pair.original(), index, sources)[unit:][: count * unit]
        got = caches.tokens(pair.consumer.cache, index, targets)
        assert got[: count * unit].equal(sent)
        assert bool((got[count * unit :] == caches.POISON).all())


def test_64_at_once(make_pair: MakePair) -> None:
    shape = Shape(blocks=256, content=512)
    pair = make_pair(shape)
    order = random.Random(2).sample(range(256), 256)
    for lease in range(64):
        pair.producer.call("grant", lease, order[lease * 4 : lease * 4 + 4])
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(lambda n: pair.fetch(n, range(n * 4, n * 4 + 4)), range(64)))
    assert pair.is_right(order, range(256))
    assert {pair.producer.call("outcome", lease) for lease in range(64)} <= {"fetched", None}
    assert pair.nothing_held()


def test_both_directions_at_once(start: Start) -> None:
    shape = Shape(blocks=64, content=512)
    there, here = start(shape, remote=True, empty=False), start(shape, remote=False, empty=False)
    theirs = caches.make(shape, there.setup.seed)
    ours = caches.make(shape, here.setup.seed)
    part, mine = p.Part(8, ((0, 16),)), here.cache.whole(range(32, 48))
    for lease in range(8):
        there.call("grant", lease, range(16))
        here.grant(lease, range(16))
        there.start("fetch", Order(here.endpoint, lease, part, mine))
        here.fetch(Order(there.endpoint, lease, part, mine))
        there.result()
        assert caches.same(here.prompts(range(32, 48)), caches.prompts(theirs, range(16)))
        assert caches.same(there.call("prompts", range(32, 48)), caches.prompts(ours, range(16)))


@pytest.mark.parametrize("role", ["consumer", "producer"])
def test_no_copy_keeps_other_threads_waiting(start: Start, way: tuple[str, str], role: str) -> None:
    """Of several tries one must go by without a pause as long as a third of it: whoever keeps
    the GIL for a copy fails them all, a busy machine does not."""
    if way[1] == "emulated":
        pytest.skip("threads in the place of a GPU's streams show nothing of it")
    shape = Shape(blocks=64, heads=8, tokens=128, content=256, layers=16)
    there = start(shape, remote=True, empty=role == "producer")
    here = start(shape, remote=False, empty=role == "consumer")
    part, mine = p.Part(128, ((0, 64),)), here.cache.whole(range(64))
    shares = []
    for lease in range(4):
        if role == "consumer":
            there.call("grant", lease, range(64))
            fetch = partial(here.fetch, Order(there.endpoint, lease, part, mine))
        else:
            here.grant(lease, range(64))
            fetch = partial(there.call, "fetch", Order(here.endpoint, lease, part, mine))
        with ThreadPoolExecutor(1) as pool:
            began = last = time.monotonic()
            longest, running = 0.0, pool.submit(fetch)
            while not running.done():
                time.sleep(0.001)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            running.result()
        shares.append(longest / (last - began))
    assert min(shares) < 1 / 3, shares


def test_nothing_moves_past_the_deadline(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.producer.call("grant", 0, [1])
    pair.fetch(0, [1])
    pair.producer.call("grant", 1, [1], 0.3)
    began = time.monotonic()
    with pytest.raises(PeerLost) as error:
        pair.fetch(1, [2], seconds=0)
    assert error.value.reason == "deadline"
    assert time.monotonic() - began < 1
    assert caches.untouched(pair.consumer.cache, but=[1])


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00", b"\x93\x01\x02\x03", bytes(64), b"\xff" * 64],
    ids=["empty", "zero", "short", "zeros", "ones"],
)
def test_garbage_is_refused(make_pair: MakePair, garbage: bytes) -> None:
    receiver, cache = (pair := make_pair()).consumer.receiver, pair.consumer.cache
    job = FetchJob(cache.whole([1]), Deadline.after(2))
    assert receiver.open(garbage) is None
    with pytest.raises(TransferError):
        pair.opened().receive(job, garbage)
    assert caches.untouched(cache, but=[1])


def test_wrong_secret(make_pair: MakePair, start: Start) -> None:
    pair = make_pair()
    guesser = start(pair.shape, remote=False, empty=True, secret=b"guessed")
    pair.producer.call("grant", 0, [1])
    with pytest.raises(PeerLost, match="is the secret the same"):
        guesser.fetch(pair.order(0, [1]))
    assert caches.untouched(guesser.cache, but=[])
    pair.fetch(0, [1])
    assert pair.is_right([1], [1])


def test_another_generation_and_a_used_lease_are_gone(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.producer.call("grant", 0, [1])
    pair.fetch(0, [1])
    with pytest.raises(LeaseGone):
        pair.fetch(0, [2])
    assert caches.untouched(pair.consumer.cache, but=[1])
