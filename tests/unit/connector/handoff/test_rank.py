"""The numbers of an engine's ranks."""

from __future__ import annotations

from disagg.connector.handoff.rank import WorkerRank


def test_all_ranks_of_all_data_parallel_ranks_have_ports_of_their_own() -> None:
    ranks = [
        WorkerRank("engine", tensor, 2, stage, 3, 4, replica)
        for replica in range(4)
        for stage in range(3)
        for tensor in range(2)
    ]
    assert [rank.port_offset for rank in ranks] == list(range(24))
    assert [rank.number for rank in ranks] == list(range(6)) * 4
