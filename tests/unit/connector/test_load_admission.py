"""Loads leave enough blocks for earlier loads: vLLM's scheduler with hardly a block to spare."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from unit.connector.modelless import BLOCK, PLAIN, Layers, answer, run
from unit.connector.offload.test_modelless import Start, ask, forget, prompt_of, start
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from disagg.connector.load_admission import LoadAdmission, load_admission_of
from disagg.vllm_compat.manager import admission_cap

pytestmark = pytest.mark.usefixtures("distributed")
__all__ = ["start"]

WINDOW = (Layers(window=3 * BLOCK + 1),)


@pytest.mark.parametrize("requests", [2, 3])
def test_loads_do_not_wait_for_each_other(start: Start, tmp_path: Path, requests: int) -> None:
    """Of each prompt, three blocks are loaded and one is to be computed; there are six."""
    whole = start(groups=WINDOW, directory=str(tmp_path))
    prompts = [prompt_of(9 * BLOCK + 20, seed=n) for n in range(requests)]
    for prompt in prompts:
        ask(whole, prompt)
    small = start(groups=WINDOW, directory=str(tmp_path), blocks=1 + 6)
    asked = {small.add(prompt, 4, None): prompt for prompt in prompts}
    run([small], lambda: set(asked) <= set(small.finished) and small.is_idle())
    for name, prompt in asked.items():
        assert small.answers[name] == answer(prompt, 4, WINDOW)
    loads = [load for step in small.scheduled for load in step.kv_connector_metadata.loads]
    assert [len(load.fillings[0].block_ids) for load in loads] == [3] * requests


def test_a_loaded_request_is_reached_behind_one_without_room(start: Start) -> None:
    """A request of a higher priority needs the blocks that a loaded one holds."""
    engine = start(blocks=1 + 6, policy="priority")
    stored, other = prompt_of(4 * BLOCK + 1, seed=1), prompt_of(4 * BLOCK, seed=2)
    ask(engine, stored)
    forget(engine)
    loaded = engine.add(stored, 3, None)
    engine.step()
    assert len(engine.block_ids(loaded)) == 4, "held for its load"
    asked = {loaded: stored, engine.add(other, 3, None, priority=-1): other}
    run([engine], lambda: set(asked) <= set(engine.finished) and engine.is_idle())
    for name, prompt in asked.items():
        assert engine.answers[name] == answer(prompt, 3, PLAIN)
    assert list(engine.finished)[-2:] == list(asked), "who holds blocks ends first"


# ---- the rule, with vLLM's cache manager alone ---------------------------------------------------

_ids = itertools.count()


def request(blocks: float) -> Request:
    """One whose prompt has so many blocks."""
    return Request(f"r{next(_ids)}", [1] * round(blocks * BLOCK), SamplingParams(), None)


def manager_of(free: int, *groups: Layers) -> KVCacheManager:
    named = [KVCacheGroupSpec([str(n)], group.spec()) for n, group in enumerate(groups or PLAIN)]
    cache = KVCacheConfig(1 + free, [], named)
    return KVCacheManager(cache, 512, BLOCK, BLOCK, max_in_flight_tokens=128, enable_caching=False)


class Room:
    """A pool with `free` blocks, and loads that have begun there."""

    def __init__(self, free: int, *groups: Layers) -> None:
        self.manager = manager_of(free, *groups)
        self.admission = LoadAdmission(self.manager)

    def begins(self, blocks: float, held: int) -> Request:
        """A load whose request has so many of its blocks."""
        one = request(blocks)
        self.allocate(one, held)
        self.admission.begins(one)
        return one

    def allocate(self, one: Request, blocks: int) -> None:
        if blocks:
            assert self.manager.allocate_slots(one, blocks * BLOCK) is not None

    def starts(self, blocks: float, loaded: int = 0) -> bool:
        """Whether a load of such a request may start, to so many computed blocks."""
        return self.admission.has_room(request(blocks), loaded * BLOCK)


def test_a_load_alone_may_always_start() -> None:
    """vLLM itself sees to its blocks; nobody else waits for them."""
    here = Room(4)
    assert here.starts(9)
    # Nor does it wait for itself, if it is asked for again.
    one = here.begins(4, held=1)
    assert here.admission.has_room(one, 0)


def test_loads_that_have_all_their_blocks_keep_nobody_waiting() -> None:
    here = Room(8)
    here.begins(3, held=3)
    here.begins(2.5, held=3)
    assert here.starts(2), "all that is free"
    assert not here.starts(3)


def test_a_load_starts_if_all_that_began_can_end() -> None:
    here = Room(9)
    here.begins(3.5, held=2)  # lacks two, of seven that are free
    assert here.starts(5)
    assert here.starts(4.5)
    assert not here.starts(5.1)
    here.begins(2, held=1)  # lacks one, of six
    assert here.starts(3)
    assert not here.starts(4)


def test_loads_that_ended_count_no_more() -> None:
    here = Room(8)
    first, second = here.begins(6, held=2), here.begins(4, held=2)
    assert not here.starts(1)
    here.admission.end([first.request_id, "unknown"])
    assert here.starts(2)
    assert not here.starts(3)
    here.admission.end([second.request_id])
    assert here.starts(9)


def test_a_load_that_holds_more_than_its_prompt_lends_nothing() -> None:
    """As with room for guesses: the loads beside it lack two blocks all the same."""
    here = Room(12)
    for blocks, held in ((2, 3), (4, 3), (4, 3)):
        here.begins(blocks, held)
    assert here.starts(1)
    assert not here.starts(2)


def test_a_preempted_load_starts_over() -> None:
    here = Room(8)
    one = here.begins(6, held=2)
    assert not here.starts(3)
    here.manager.free(one)
    assert here.starts(9)


def test_blocks_that_a_window_has_passed_are_not_needed() -> None:
    """Neither by a load that starts, nor by those that began: a window holds so many at most."""
    here = Room(1 + 12, *WINDOW)
    (group,) = here.manager.coordinator.single_type_managers
    most = admission_cap(group)
    assert most == 8, "else choose other sizes"
    here.begins(16, held=1)
    # Of ten blocks the window has passed six when nine are loaded.
    assert here.starts(10, loaded=9)
    assert not here.starts(10, loaded=8)
    assert not here.starts(10)


def test_each_group_needs_blocks_of_its_own() -> None:
    here = Room(12, Layers(), *WINDOW)
    here.begins(2, held=1)
    free = here.manager.block_pool.get_num_free_blocks()
    assert free == 12 - 2
    assert here.starts(4)
    assert not here.starts(5)
    # Of five blocks the window has passed two.
    assert not here.starts(5, loaded=4)
    assert here.starts(5, loaded=5)


def test_others_step_aside_for_a_loaded_request_that_holds_blocks() -> None:
    here = Room(8)
    one, other = here.begins(3, held=3), request(2)
    assert not here.admission.steps_aside(other), "one is still loading"
    here.admission.loaded([one.request_id, "unknown"])
    assert here.admission.steps_aside(other)
    assert not here.admission.steps_aside(one)
    here.manager.free(one)
    assert not here.admission.steps_aside(other), "one starts over, and waits like other"
    here.allocate(one, 3)
    here.admission.begins(one)
    assert not here.admission.steps_aside(other), "one loads again"
    here.admission.loaded([one.request_id])
    assert here.admission.steps_aside(other)
    here.admission.end([one.request_id])
    assert not here.admission.steps_aside(other)


def test_one_for_each_engine() -> None:
    first, second = manager_of(4), manager_of(4)
    assert load_admission_of(first) is load_admission_of(first)
    assert load_admission_of(first) is not load_admission_of(second)
