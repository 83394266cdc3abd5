"""`bench serve --conversations`: the load, its turns, and the tokens that are computed twice."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from unit.bench.serve.test_run import DONE, HEAD, TARGETS, event, outcome, plan, server

from disagg.bench.results import Output
from disagg.bench.serve import load as serve_load
from disagg.bench.serve import run as serve
from disagg.bench.serve.conversations import (
    Conversation,
    Exchange,
    Talk,
    TokenCounts,
    Turn,
    conversations,
    counted,
    unavoidable,
)
from disagg.bench.serve.load import Batch
from disagg.bench.serve.report import line, show, tables
from disagg.bench.serve.score import Run, row
from disagg.errors import ConfigError

TALK = Talk(5, turns=4, think_s=3, shared_prompts=2, shared_tokens=30, turn_tokens=6)


# ---- the load ----------------------------------------------------------------------------------


def test_conversations_share_beginnings_and_nothing_else() -> None:
    made = conversations(TALK, 1.0, 1, "a")
    firsts = [list(one.turns[0].new) for one in made]
    assert [len(first) for first in firsts] == [36] * 5
    assert firsts[0][:30] == firsts[2][:30] == firsts[4][:30]
    assert firsts[1][:30] == firsts[3][:30] != firsts[0][:30]
    assert len({tuple(first[30:]) for first in firsts}) == 5
    assert [[len(turn.new) for turn in one.turns[1:]] for one in made] == [[6] * 3] * 5
    other = conversations(TALK, 1.0, 1, "b")
    assert {tuple(one.turns[0].new[:30]) for one in other}.isdisjoint(
        tuple(first[:30]) for first in firsts
    )


def test_a_seed_gives_the_same_times_with_other_tokens_and_at_other_rates() -> None:
    one, other = conversations(TALK, 1.0, 1, "a"), conversations(TALK, 4.0, 1, "b")
    assert [c.at for c in one] == pytest.approx([4 * c.at for c in other])
    assert one[0].at == 0
    waits = [[turn.waits_s for turn in c.turns] for c in one]
    assert waits == [[turn.waits_s for turn in c.turns] for c in other]
    assert [first for first, *_ in waits] == [0] * 5
    assert one != conversations(TALK, 1.0, 2, "a")


def test_think_times_are_exponential() -> None:
    many = conversations(replace(TALK, conversations=300, turns=11), 1.0, 1, "a")
    waits = [turn.waits_s for one in many for turn in one.turns[1:]]
    assert sum(waits) / len(waits) == pytest.approx(3, rel=0.06)
    assert sum(wait > 3 for wait in waits) / len(waits) == pytest.approx(0.368, abs=0.03)


def test_each_prompt_is_the_history_with_the_tokens_that_were_answered() -> None:
    asked: list[list[int]] = []

    def answer(connection: socket.socket, body: Mapping[str, Any]) -> None:
        asked.append(body["prompt"])
        first = 1000 * len(body["prompt"])
        connection.sendall(HEAD + event(first) + event(first + 1) + DONE)

    turns = [Turn(0.0, [1, 2, 3], 2), Turn(0.2, [4], 2), Turn(0.0, [5, 6], 2)]
    with server(answer) as url:
        began = time.perf_counter()
        batch = serve_load.converse(url, [Conversation(0.1, turns)])
        took = time.perf_counter() - began
    assert asked == [
        [1, 2, 3],
        [1, 2, 3, 3000, 3001, 4],
        [1, 2, 3, 3000, 3001, 4, 6000, 6001, 5, 6],
    ]
    assert [list(one.prompt) for one in batch.exchanges] == asked
    assert list(batch.exchanges[0].answer) == [3000, 3001]
    assert [one.problem for one in batch.outcomes] == [None] * 3
    assert [one.ask.prompt_tokens for one in batch.outcomes] == [3, 6, 10]
    assert took >= 0.3


def test_after_a_turn_that_failed_nothing_more_is_sent() -> None:
    asked: list[int] = []

    def answer(connection: socket.socket, body: Mapping[str, Any]) -> None:
        asked.append(len(body["prompt"]))
        whole = len(body["prompt"]) < 5
        connection.sendall(HEAD + event(7) + (DONE if whole else b""))

    turns = [Turn(0.0, [1] * 3, 1), Turn(0.0, [2], 1), Turn(0.0, [3], 1)]
    with server(answer) as url:
        batch = serve_load.converse(url, [Conversation(0.0, turns), Conversation(0.0, turns[1:2])])
    assert sorted(asked) == [1, 3, 5]
    first, second, third, other = batch.outcomes
    assert (first.problem, other.problem) == (None, None)
    assert second.problem is not None
    assert "without [DONE]" in second.problem
    assert third.problem == "an earlier turn of the conversation failed"
    assert len(batch.exchanges) == 2


# ---- what is computed --------------------------------------------------------------------------


def exchange(sent_s: float, prompt: str, answer: str = "") -> Exchange:
    """Letters are tokens."""
    return Exchange(sent_s, [ord(one) for one in prompt], [ord(one) for one in answer])


@pytest.mark.parametrize(
    ("exchanges", "expected"),
    [
        ([exchange(0, "abcdef")], 6),
        # The same again: the block of its last token is computed, if that ends a block.
        ([exchange(0, "abcdef"), exchange(1, "abcdef")], 6 + 2),
        ([exchange(0, "abcdefgh"), exchange(1, "abcdefgh")], 8 + 4),
        ([exchange(0, "abcdefgh"), exchange(1, "abcdefghi")], 8 + 1),
        # A block counts with all before it.
        ([exchange(0, "abcdefgh"), exchange(1, "xxxxefghi")], 8 + 9),
        ([exchange(0, "abcdefgh"), exchange(1, "abcdxxxxi")], 8 + 5),
        # The answer's tokens are in the cache, but for the last one.
        ([exchange(0, "abcdef", "ghi"), exchange(1, "abcdefghijk")], 6 + 3),
        ([exchange(0, "abcdef", "gh"), exchange(1, "abcdefghijk")], 6 + 7),
        # In the order of sending, however they are listed.
        ([exchange(1, "abcdefghij"), exchange(0, "abcdefgh")], 8 + 2),
    ],
)
def test_each_block_is_unavoidable_once(exchanges: list[Exchange], expected: int) -> None:
    assert unavoidable(exchanges, block=4) == expected


def sources(**counts: float) -> dict[str, float]:
    return {f"vllm:prompt_tokens_by_source_total{{source={k}}}": v for k, v in counts.items()}


def test_tokens_are_summed_over_engines_and_only_of_the_run() -> None:
    before = [sources(local_compute=100, local_cache_hit=7), sources(local_compute=50)]
    after = [
        sources(local_compute=104, local_cache_hit=7, external_kv_transfer=4),
        sources(local_compute=59, local_cache_hit=4),
    ]
    exchanges = [exchange(0, "abcdef"), exchange(1, "abcdef")]
    found = counted(before, after, exchanges, block=4)
    assert found == TokenCounts(sent=12, computed=13, cached=4, moved=4, unavoidable=8)
    assert found.over == 13 / 8


# ---- what it comes to --------------------------------------------------------------------------


def test_the_tables_of_conversations_show_what_was_computed_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = TokenCounts(1000, 300, 650, 50, 200)
    outcomes = [outcome(0.5, 0.01), outcome(2.0)]
    run = Run("apart-knows", 0.5, 0.5, Batch(outcomes, 10.0, 0.1), 1, counts)
    found = row(run, TARGETS)
    assert found["tokens"]["over"] == 1.5
    assert found["good_rate"] == {"on_average": 0.1, "throughout": 0.1}
    assert "computed 1.50 times the unavoidable tokens" in line(found)
    report = {
        "rows": [found],
        "ratios": [],
        "goodput": {},
        "targets": {"ttft_s": 1, "itl_s": 0.1},
        "cores": 2,
        "load_before": 0.5,
        "minutes": 1,
    }
    runs, computed = tables(report)
    assert runs.rows[0]["way"] == "apart-knows"
    assert computed.rows[0]["computed / unavoidable"] == 1.5
    assert computed.rows[0]["good requests/s"] == 0.1
    show(report, Console())
    assert "Unavoidable:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"talk": replace(TALK, turns=0)}, "--turns: 0 — must be at least 1"),
        ({"talk": replace(TALK, think_s=-1)}, "--think-s and --shared-tokens"),
        ({"talk": replace(TALK, turn_tokens=4096)}, "--turns: a conversation of 16"),
        ({"talk": TALK, "trace": "x.jsonl"}, "--conversations: not with --trace"),
        ({"pairs": 0}, "--pairs: 0 — must be at least 1"),
    ],
)
def test_conversations_that_cannot_be_held_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve.run(plan(**changes), Output())
    assert words in str(caught.value)
