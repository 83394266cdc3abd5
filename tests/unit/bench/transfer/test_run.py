"""`bench transfer`: block ids, ratios, and one small run over real processes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from disagg.bench.results import Output, newest
from disagg.bench.transfer import run as transfer
from disagg.bench.transfer.memory import BenchMemory, scattered
from disagg.bench.transfer.plan import TransferCase, TransferPlan
from disagg.bench.transfer.report import rows, targets
from disagg.errors import ConfigError

PLAN = TransferPlan(["shared_storage"], [1, 2], [65536], [1, 2], "cpu", 1)


def test_ids_are_scattered_half_of_them_in_runs() -> None:
    ids = scattered(1000, 1000, np.random.default_rng(0))
    assert sorted(ids) == list(range(1000))
    follows = sum(b == a + 1 for a, b in pairwise(ids))
    assert 0.35 < follows / len(ids) < 0.55  # seven of every eight blocks of one half


def test_wrong_blocks_are_found() -> None:
    memory = BenchMemory(1 << 20, "cpu")
    memory.fill()
    assert memory.wrong_blocks(8192, [0, 5], [0, 5]) == 0
    assert memory.wrong_blocks(8192, [0, 5], [0, 6]) == 8  # of one block, in each layer
    memory.wipe()
    assert memory.wrong_blocks(8192, [3], [3]) == 8


def test_several_fetches_at_once_only_while_they_fit() -> None:
    assert [(case.megabytes, case.fetches) for case in PLAN.cases()] == [(1, 1), (2, 1), (1, 2)]
    assert PLAN.cache_bytes() >= max(case.num_bytes for case in PLAN.cases())


def test_ratios() -> None:
    case = TransferCase(1, 65536, 1)
    samples = {(case, "memcpy"): [0.1, 0.2, 0.3], (case, "x"): [0.4], (case, "nixl"): [0.8]}
    (_, row, _) = rows(PLAN, samples, ["nixl"], [])
    assert (row["over_memcpy"], row["over_nixl"], row["over_nixl_tcp"]) == (0.5, 2.0, None)


def test_targets_are_of_fetches_that_decode_would_not_compute() -> None:
    plan = TransferPlan(["process_memory"], [1, 33], [65536], [1], "cpu", 1)
    took = {"memcpy": 0.7, "process_memory": 1.0, "nixl": 2.0, "nixl sm": 1.6}
    samples = {(case, way): [took[way]] for case in plan.cases() for way in took}
    report = {"device": "cpu", "rows": rows(plan, samples, ["nixl sm"], [])}
    memcpy, nixl, own = [one for one in targets(report) if one is not None]
    assert (memcpy.at, memcpy.measured, memcpy.at_least, memcpy.met) == ("33 MB", 0.7, 0.8, False)
    assert (nixl.measured, nixl.at_least, nixl.met) == (1.6, 1.5, True)
    assert (own.measured, own.at_least, own.met) == (0.8, 0.95, False)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such transport"):
        TransferPlan(["pigeon"], [1], [65536], [1], "cpu", 1).check()


def test_a_small_run(tmp_path: Path) -> None:
    output = Output(tmp_path / "figures.json", tmp_path / "results")
    assert transfer.run(PLAN, with_peer=False, output=output) == 0
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report["problems"] == {}
    assert {row["way"] for row in report["rows"]} == {
        "memcpy", "memcpy in blocks", "shared_storage"
    }  # fmt: skip
    _, result = newest(tmp_path / "results")["transfer"]
    assert result.figures == report
    assert [len(table.rows) for table in result.tables] == [3, 1, 3, 1]
    assert result.targets == []  # neither a transport nor a size that has one
