"""The producer part of a worker rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from disagg.connector.handoff.messages import Grant, Growing, Grown, StepWork
from disagg.connector.handoff.producer_worker import ProducerWorker
from disagg.connector.handoff.rank import RankCache, WorkerRank
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.errors import ConfigError, LeaseGone
from disagg.testing.ports import free_port
from disagg.transport.blocks import BlockCache, Region
from disagg.transport.control.lease import Progress
from disagg.transport.registry import Means

SECRET = b"0" * 32
STREAM, OTHER, PROMPT = b"s" * 16, b"t" * 16, b"p" * 16


@contextmanager
def producer(folder: Path, port: int, tensor: int, replica: int) -> Iterator[ProducerWorker]:
    settings = ConnectorSettings(port=port, transports=["tcp"], storage_path=folder)
    memory = torch.zeros((4, 1, 4, 8), dtype=torch.uint8)
    cache = RankCache(BlockCache([Region("layer", memory, "U8")]), ("layer",), {}, None)
    means = Means("127.0.0.1", SECRET, settings.storage(SECRET))
    rank = WorkerRank("engine", tensor, 2, 0, 1, 2, replica)
    made = ProducerWorker(settings, rank, cache, means)
    try:
        yield made
    finally:
        made.close()


def test_with_a_fixed_port_data_parallel_ranks_listen_beside_each_other(tmp_path: Path) -> None:
    first = free_port()  # the three after it are nobody's either
    ranks = [(tensor, replica) for replica in range(2) for tensor in range(2)]
    with ExitStack() as stack:
        found = [
            stack.enter_context(producer(tmp_path, first, *rank)).endpoint.port for rank in ranks
        ]
    assert found == [first, first + 1, first + 2, first + 3]


def test_without_a_fixed_port_each_rank_takes_a_free_one(tmp_path: Path) -> None:
    with producer(tmp_path, 0, 1, 1) as one, producer(tmp_path, 0, 1, 1) as other:
        assert 0 < one.endpoint.port != other.endpoint.port


def test_a_port_past_the_last_one_is_refused(tmp_path: Path) -> None:
    expected = "port: 65535 — rank 1 of data parallel rank 0 would listen on 65536; set a lower"
    with pytest.raises(ConfigError, match=expected), producer(tmp_path, 65535, 1, 0):
        pass


def test_a_consumer_that_may_still_load_does_not_count_as_dead(tmp_path: Path) -> None:
    """It gives up first."""
    with producer(tmp_path, 0, 0, 0) as made:
        patience_s = made._leases._read_limit_s, made._server._use_limit_s
    assert min(patience_s) > ConnectorSettings().load_deadline_s


def growing(lease: int, stream: bytes) -> Growing:
    return Growing(lease, f"r{lease}", stream, PROMPT, 2)


def test_a_lease_grows_with_the_steps_and_is_granted(tmp_path: Path) -> None:
    with producer(tmp_path, 0, 0, 0) as made:
        made.start(StepWork(growing=[growing(0, STREAM)]))
        held = made._leases.follow(STREAM, PROMPT)
        for work, now, blocks in (
            (StepWork(grown=[Grown(0, 0, 4, [(0, [3])])]), Progress(0, 4, False), [3, -1]),
            (StepWork(grown=[Grown(0, 1, 0, [])]), Progress(1, 0, False), [-1, -1]),
            (StepWork(grown=[Grown(0, 1, 8, [(0, [1, 2])])]), Progress(1, 8, False), [1, 2]),
            (StepWork(grants=[Grant(0, "r0", [1, 2], 30)]), Progress(1, 8, True), [1, 2]),
        ):
            made.start(work)
            assert made._leases.progress(held, -1, 0, 0.0) == now
            assert list(held.block_ids) == blocks
        made._leases.done_using(0)
        made._leases.check_integrity()


def test_in_one_step_all_of_a_lease_may_be_told(tmp_path: Path) -> None:
    """As of a short prompt; or of one that ends, or was reset, in the step that it begins in."""
    with producer(tmp_path, 0, 0, 0) as made:
        grown = [Grown(0, 0, 4, [(0, [3])])]
        granted = [Grant(0, "r0", [3, 1], 30)]
        made.start(StepWork(growing=[growing(0, STREAM)], grown=grown, grants=granted))
        assert made._leases.follow(STREAM, PROMPT).grows is False
        made._leases.done_using(0)
        made.start(StepWork(growing=[growing(1, OTHER)], stopped=[1], revoked=1))
        assert [one.outcome for one in made.take_ended()] == ["aborted"]
        for stream in (STREAM, OTHER):
            assert made._leases.has_begun(stream)
            with pytest.raises(LeaseGone):
                made._leases.follow(stream, PROMPT)
        made._leases.check_integrity()


def test_a_stream_that_never_begins_is_told_to_who_waits(tmp_path: Path) -> None:
    with producer(tmp_path, 0, 0, 0) as made:
        assert not made._leases.has_begun(STREAM)
        made.start(StepWork(unwanted=[STREAM]))
        assert made._leases.has_begun(STREAM)
