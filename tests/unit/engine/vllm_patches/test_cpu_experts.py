"""Mixtures of experts on several CPU ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from disagg.engine.vllm_patches import cpu_experts  # noqa: E402

RANKS, SIZES = 3, [2, 0, 5]


def rows(rank: int, count: int) -> Any:
    return torch.arange(count * 4.0).reshape(count, 4) + 100 * rank


def work(rank: int, store: str, answers: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )

    def all_reduce(tensor: Any) -> Any:
        torch.distributed.all_reduce(tensor)
        return tensor

    communicator = SimpleNamespace(
        rank_in_group=rank,
        world_size=RANKS,
        device_group=torch.distributed.group.WORLD,
        all_reduce=all_reduce,
    )
    own, ids = rows(rank, SIZES[rank]), torch.full((SIZES[rank], 2), rank)
    gathered = cpu_experts.all_gatherv(communicator, [own, ids], 0, SIZES)
    whole = rows(rank, sum(SIZES))
    kept = whole.clone()
    mine = cpu_experts.reduce_scatterv(communicator, whole, 0, SIZES)
    output = torch.empty_like(mine)
    cpu_experts.reduce_scatterv_into_output(communicator, whole, output, 0, SIZES)
    equal = cpu_experts.all_gatherv(communicator, rows(rank, 2))
    shown = [*gathered, mine, output, equal, whole - kept]
    answers.put((rank, [one.tolist() for one in shown]))


def test_rows_of_unequal_numbers(tmp_path: Path) -> None:
    """Each rank gets the rows of all in order, and its own part of the sum."""
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    store = str(tmp_path / "store")
    ranks = [spawn.Process(target=work, args=(rank, store, answers)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    try:
        found = dict(answers.get(timeout=120) for _ in ranks)
    finally:
        for one in ranks:
            one.join(10)
            one.kill()
    everything = torch.cat([rows(rank, SIZES[rank]) for rank in range(RANKS)])
    total = sum(rows(rank, sum(SIZES)) for rank in range(RANKS))
    begin = 0
    for rank, size in enumerate(SIZES):
        gathered, ids, mine, output, equal, changed = found[rank]
        assert gathered == everything.tolist()
        assert ids == [[r, r] for r in range(RANKS) for _ in range(SIZES[r])]
        assert mine == output == total[begin : begin + size].tolist()
        assert equal == torch.cat([rows(r, 2) for r in range(RANKS)]).tolist()
        assert changed == torch.zeros(sum(SIZES), 4).tolist()  # the input is not overwritten
        begin += size


def apply(
    topk_weights: Any,
    topk_ids: Any,
    expert_map: Any,
    apply_router_weight_on_input: bool,
    seen: list[Any],
) -> None:
    seen += [topk_weights.tolist(), topk_ids.tolist(), topk_ids.dtype]


def test_experts_of_other_ranks_get_no_weight() -> None:
    seen: list[Any] = []
    mended = cpu_experts.by_own_number(apply)
    places = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    mended(weights, topk_ids=ids, expert_map=places, apply_router_weight_on_input=False, seen=seen)
    assert seen == [[[0.0, 0.75], [0.5, 0.0]], [[0, 1], [0, 0]], torch.int32]
    assert weights.tolist() == [[0.25, 0.75], [0.5, 0.5]]
    assert cpu_experts.by_own_number(mended) is mended


def test_all_experts_are_left_alone() -> None:
    seen: list[Any] = []
    ids, weights = torch.tensor([[5, 7]]), torch.tensor([[1.0, 2.0]])
    cpu_experts.by_own_number(apply)(weights, ids, None, False, seen)
    assert seen == [[[1.0, 2.0]], [[5, 7]], torch.int64]


def test_weights_on_inputs_are_refused_with_own_experts() -> None:
    """They are on the tokens already, also for experts of other ranks."""
    places, ids = torch.tensor([0]), torch.tensor([[0]])
    with pytest.raises(NotImplementedError, match="enable_expert_parallel"):
        cpu_experts.by_own_number(apply)(torch.ones(1, 1), ids, places, True, [])
