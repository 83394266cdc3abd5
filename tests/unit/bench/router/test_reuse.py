"""`disagg bench reuse`: the trace, the simulated caches, and what replays come to."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from disagg.bench.results import Output, load
from disagg.bench.router import reuse, reuse_trace
from disagg.bench.router.reuse import Replay, ReusePlan, row
from disagg.bench.router.reuse_engines import LruCache, Speeds
from disagg.bench.router.reuse_trace import BLOCK, TracedRequest, ideal
from disagg.errors import ConfigError

SPEEDS = Speeds(computed=1000, moved=10_000)


def asked(at_ms: float, *blocks: int, tokens: int | None = None) -> TracedRequest:
    """A prompt of these blocks; by default half of one more, which has an id of its own."""
    tail = [] if tokens is not None else [10_000 + blocks[-1]]
    length = tokens if tokens is not None else len(blocks) * BLOCK + BLOCK // 2
    return TracedRequest(at_ms, length, 1, [*blocks, *tail])


def plan(**changes: Any) -> ReusePlan:
    settings: dict[str, Any] = {
        "trace": Path("none.jsonl"),
        "engines": [5],
        "cache_tokens": 100 * BLOCK,
        "policies": ["cache_aware"],
        "speeds": SPEEDS,
    }
    return ReusePlan(**(settings | changes))


def replayed(
    requests: list[TracedRequest],
    policy: str = "cache_aware",
    *,
    shares: bool = False,
    engines: int = 2,
    **changes: Any,
) -> Replay:
    replay = Replay(plan(**changes), engines, policy, shares=shares)
    for request in requests:
        replay.arrives(request)
    replay.finish()
    return replay


# ---- the trace ---------------------------------------------------------------------------------


def test_a_trace_is_read_and_its_prompts_share_what_their_ids_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 9.5, "input_length": 1024, "output_length": 5, "hash_ids": [0, 3]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = reuse_trace.read(path)
    assert [len(first.token_ids()), len(second.token_ids())] == [1100, 1024]
    assert first.token_ids()[:512] == second.token_ids()[:512]
    assert first.token_ids()[512] != second.token_ids()[512]
    assert (first.reusable, first.cacheable) == ([0, 1], [0, 1])
    # Its last token has to be computed, so the last block is of no use to itself.
    assert (second.reusable, second.cacheable) == ([0], [0, 3])


GOOD = {"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "is empty"),
        ([GOOD, {**GOOD, "timestamp": 4}], "trace.jsonl:2: timestamp: earlier"),
        ([{**GOOD, "hash_ids": [0]}], "trace.jsonl:1: hash_ids: 1, but the prompt has 2 blocks"),
        ([GOOD, {**GOOD, "hash_ids": [2, 1]}], "1 stood behind another block before"),
        ([{**GOOD, "input_length": 0}], ">= 1 - at `$.input_length`"),
        ([{"timestamp": 1}], "missing required field"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(
    tmp_path: Path, lines: list[dict[str, Any]], words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError) as caught:
        reuse_trace.read(path)
    assert words in str(caught.value)


def test_the_ideal_computes_each_whole_block_once_and_every_tail() -> None:
    best = ideal([asked(0, 1, 2), asked(1, 1, 2, 3), asked(2, 1, 4)])
    tails = 3 * BLOCK // 2
    assert best.blocks == 4
    assert best.tokens == 7 * BLOCK + tails
    assert best.unavoidable == 4 * BLOCK + tails
    assert best.reuse == pytest.approx(3 * BLOCK / best.tokens)
    # Of the same prompt again, whose last block is whole, that block is computed again.
    twice = ideal([asked(0, 1, 2, tokens=2 * BLOCK)] * 2)
    assert twice.unavoidable == 3 * BLOCK


def test_a_cache_that_is_too_small_computes_again_what_it_lost() -> None:
    requests = [asked(0, 1, 2), asked(1, 3, 4), asked(2, 1, 2)]
    best = ideal(requests)
    assert reuse_trace.computed(requests, LruCache(4)) == best.unavoidable
    assert reuse_trace.computed(requests, LruCache(3)) == best.unavoidable + BLOCK
    assert reuse_trace.computed(requests, LruCache(2)) == best.tokens


# ---- a cache -----------------------------------------------------------------------------------


def test_a_cache_loses_the_ends_of_the_prompts_used_longest_ago() -> None:
    cache = LruCache(5)
    assert cache.keep([1, 2, 3]) == (0, [])
    assert cache.keep([4, 5]) == (0, [])
    assert cache.keep([1, 6]) == (1, [3])
    assert cache.depth([1, 2, 3]) == 2
    cache.use([4, 5])
    assert cache.keep([7, 8]) == (0, [2, 6])
    assert [cache.depth(one) for one in ([1, 2], [1, 6], [4, 5], [7, 8])] == [1, 1, 2, 2]
    assert cache.keep([11, 12, 13, 14, 15, 16, 17]) == (0, [1, 5, 4, 8, 7])
    assert cache.depth([11, 12, 13, 14, 15, 16, 17]) == 5


def test_a_cache_never_holds_a_block_without_those_before_it() -> None:
    generator, cache, held = random.Random(1), LruCache(40), set[int]()
    parent_of: dict[int, int] = {}
    for _ in range(500):
        prompt = [generator.randrange(3)]
        for _ in range(generator.randrange(12)):
            prompt.append(prompt[-1] * 3 + 10 + generator.randrange(3))
        parent_of |= dict(zip(prompt[1:], prompt, strict=False))
        _, gone = cache.keep(prompt)
        held = (held | set(prompt)) - set(gone)
        assert len(cache) == len(held) <= 40
        assert all(parent_of[block] in held for block in held if block in parent_of)


# ---- replays -----------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_is_and_only_the_rest_is_computed() -> None:
    requests = [asked(0, 1, 2), asked(1, 5, 6), asked(20_000, 1, 2, 3), asked(40_000, 5, 6, 7)]
    replay = replayed(requests)
    best = ideal(requests)
    found = row(replay, best)
    assert found["computed"] == best.unavoidable
    assert (found["reuse"], found["over"], found["moved"]) == (round(best.reuse, 4), 1.0, 0.0)
    assert sorted(e.requests for e in replay.engines.values()) == [2, 2]
    # By the picture of the router, which the engines' events have made.
    assert sum(len(e.picture) for e in replay.engines.values()) == best.blocks
    assert all(e.picture.ignored.total() == 0 for e in replay.engines.values())


def test_times_are_simulated_and_one_prompt_waits_for_another() -> None:
    tokens = BLOCK + BLOCK // 2
    replay = replayed([asked(0, 1), asked(0, 2), asked(100, 1)], "round_robin", engines=1)
    # The third finds the block of the first.
    ends = [tokens / 1000, 2 * tokens / 1000, (2 * tokens + BLOCK // 2) / 1000]
    assert replay.first_s == pytest.approx([ends[0], ends[1], ends[2] - 0.1])
    assert replay.now_s == pytest.approx(ends[2])
    quick = replayed([asked(0, 1), asked(100_000, 2)], engines=1, faster=10)
    assert quick.now_s == pytest.approx(10 + tokens / 1000)


def test_without_sharing_each_engine_computes_the_same_prefix() -> None:
    requests = [asked(20_000 * n, 1, 2, 3, 10 + n) for n in range(4)]
    best = ideal(requests)
    alone = row(replayed(requests, "round_robin", engines=4), best)
    assert alone["computed"] == best.tokens
    shared = row(replayed(requests, "round_robin", shares=True, engines=4), best)
    assert shared["computed"] == best.unavoidable
    assert shared["moved"] == round(9 * BLOCK / best.tokens, 4)
    assert shared["over"] == 1.0
    assert shared["first_p99_s"] == alone["first_p99_s"]  # of the first prompt
    assert shared["first_p50_s"] < alone["first_p50_s"]


def test_two_that_come_at_once_compute_what_neither_holds_yet() -> None:
    requests = [asked(0, 1, 2), asked(0, 1, 2), asked(20_000, 1, 2)]
    best = ideal(requests)
    found = row(replayed(requests, "round_robin", shares=True), best)
    assert found["computed"] == best.unavoidable + 2 * BLOCK


def test_what_the_neighbour_has_evicted_since_is_computed() -> None:
    room = {"cache_tokens": 3 * BLOCK}
    requests = [
        asked(0, 1, 11, 21),  # engine 0
        asked(0, 7, 17, 27),  # engine 1
        asked(20_000, 2, 12, 22),  # engine 0: evicts the first at its end
        asked(20_001, 1, 11, 21),  # engine 1, where it evicts the second
    ]
    replay = replayed(requests, "round_robin", shares=True, **room)
    assert sum(e.moved for e in replay.engines.values()) == 3 * BLOCK  # engine 0 still had it
    requests.insert(3, asked(20_000, 8, 18, 28))  # engine 1 is busy until engine 0 is done
    requests.insert(4, asked(20_001, 3))  # engine 0
    replay = replayed(requests, "round_robin", shares=True, **room)
    assert sum(e.moved for e in replay.engines.values()) == 0


def test_a_run_writes_what_it_found_and_says_that_engines_are_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small_trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * n,
            "input_length": 3 * BLOCK,
            "output_length": 1,
            "hash_ids": [0, 1 + n % 5, 10 + n],
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"trace": path, "policies": ["cache_aware", "least_loaded"], "shares": True}
    output = Output(tmp_path / "figures.json", tmp_path)
    assert reuse.run(plan(**changes), output) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["simulated"] is True
    assert figures["unavoidable"] == (1 + 5 + 40) * BLOCK
    forms = [(one["policy"], one["shares"]) for one in figures["rows"]]
    assert forms == [
        (name, form) for name in ("cache_aware", "least_loaded") for form in (False, True)
    ]
    (file,) = tmp_path.glob("*-reuse-small.json")
    assert [len(table.rows) for table in load(file).tables] == [6, 4]
    assert "SIMULATED engines" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": ["session_affinity"]}, "--policies: session_affinity — choose from"),
        ({"policies": []}, "--policies: name at least one"),
        ({"engines": [8, 0]}, "--engines: each"),
        ({"cache_tokens": 511}, "--cache-tokens: 511"),
        ({"faster": 0}, "must be above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reuse.run(plan(**changes), Output())
    assert words in str(caught.value)
