"""`bench serve`: the load that it makes and sends, and what outcomes come to."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from disagg.bench.results import Output
from disagg.bench.serve import load as serve_load
from disagg.bench.serve import run as serve
from disagg.bench.serve import trace as serve_trace
from disagg.bench.serve.load import Batch, Reading, RequestOutcome
from disagg.bench.serve.plan import ServePlan
from disagg.bench.serve.report import show, tables, targets
from disagg.bench.serve.score import Run, Targets, goodput, percentile, ratios, row
from disagg.bench.serve.trace import Ask, Kind, parse_mix, poisson
from disagg.errors import ConfigError

MIX = [Kind(0.75, 100, 8), Kind(0.25, 2000, 64)]
DONE = b"data: [DONE]\n\n"


# ---- the load ------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process_of_the_kinds_asked_for() -> None:
    asks = poisson(MIX, rate=50, duration_s=400, seed=1)
    assert len(asks) == pytest.approx(20_000, rel=0.03)
    gaps = [b.at - a.at for a, b in itertools.pairwise(asks)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    # Of an exponential distribution the deviation is the mean, and 1/e of all are longer.
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(mean, rel=0.05)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)
    long = [ask for ask in asks if ask.prompt_tokens == 2000]
    assert len(long) / len(asks) == pytest.approx(0.25, abs=0.02)
    assert {ask.output_tokens for ask in long} == {64}
    assert max(ask.at for ask in asks) < 400


def test_a_seed_gives_the_same_requests_at_every_rate_only_closer_together() -> None:
    slow, fast = poisson(MIX, 1, 60, seed=3), poisson(MIX, 4, 60, seed=3)
    assert slow == poisson(MIX, 1, 60, seed=3) != poisson(MIX, 1, 60, seed=4)
    assert len(slow) < len(fast)
    for one, other in zip(slow, fast, strict=False):
        assert one.prompt_tokens == other.prompt_tokens
        assert one.at == pytest.approx(4 * other.at, abs=1e-5)


def test_no_prompt_comes_twice_unless_asked() -> None:
    asks = poisson(MIX, 5, 60, seed=1)
    made = serve_trace.prompts(asks, "a")
    assert [len(prompt) for prompt in made] == [ask.prompt_tokens for ask in asks]
    assert len({tuple(prompt) for prompt in made}) == len(asks)
    assert made != serve_trace.prompts(asks, "b")

    again = poisson(MIX, 5, 60, seed=1, repeat_share=0.5)
    assert [(ask.at, ask.prompt_tokens) for ask in again] == [
        (ask.at, ask.prompt_tokens) for ask in asks
    ]
    different = {tuple(prompt) for prompt in serve_trace.prompts(again, "a")}
    assert len(different) == sum(ask.same_as is None for ask in again) < 0.7 * len(again)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    asks = poisson(MIX, 5, 20, seed=1, repeat_share=0.3)
    serve_trace.write(path, asks)
    assert serve_trace.read(path) == asks
    first = json.loads(path.read_text().splitlines()[0])
    assert set(first) == {"at", "prompt_tokens", "output_tokens"}


GOOD = '{"at": 1, "prompt_tokens": 5, "output_tokens": 3}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        (GOOD + "{}\n", "trace.jsonl:2: Object missing required field `at`"),
        (GOOD + GOOD.replace("1", "0.5"), "trace.jsonl:2: at: earlier than the line before"),
        (GOOD.replace("5", "0"), ">= 1 - at `$.prompt_tokens`"),
        (GOOD.replace("at", "time"), "unknown field `time`"),
        (GOOD.replace("}", ', "same_as": 0}'), "same_as: 0 — name an earlier line"),
        (GOOD + GOOD.replace("5", "6").replace("}", ', "same_as": 0}'), "of same_as has 5"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        serve_trace.read(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["0.5:10", "half:10:10", "0.5:10:10", "1:0:10", "0.7:1:1,0.7:1:1"])
def test_a_mix_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--mix"):
        parse_mix(text)
    assert parse_mix("0.7:128:64,0.3:2000:32")[1] == Kind(0.3, 2000, 32)


# ---- one answer ----------------------------------------------------------------------------


def event(*tokens: int) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"token_ids": list(tokens)}]}).encode()


def test_tokens_come_with_the_piece_that_completes_their_event() -> None:
    first = b'data: {"choices": [{"token_ids": [], "prompt_token_ids": [1, 2]}]}\n\n'
    cut = event(7)
    pieces = [
        (1.0, first),
        (2.0, event(5)),
        (3.0, event(6) + cut[:9]),
        (4.0, cut[9:] + event(8, 9)),
        (5.0, DONE),
    ]
    assert Reading(pieces).chunks() == [(2.0, 1), (3.0, 1), (4.0, 3)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (event(1), r"without \[DONE\]"),
        (b'data: {"error": {"message": "it died"}}\n\n' + DONE, "it died"),
        (b"data: {]\n\n" + DONE, "not an event"),
    ],
)
def test_what_is_no_whole_answer_is_a_problem(answer: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Reading([(0.0, answer)]).chunks()


# ---- over real sockets ---------------------------------------------------------------------

Answer = Callable[[socket.socket, dict[str, Any]], None]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """Each connection has one request, which `answer` answers."""

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            answer(connection, json.loads(received.partition(b"\r\n\r\n")[2]))

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    threads: list[threading.Thread] = []
    listening = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for thread in (accepting, *threads):
            thread.join(5)


SLOW_S = 1.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def sends(load: Sequence[Ask], answer: Answer) -> Batch:
    with server(answer) as url:
        return serve_load.run(url, load, serve_trace.prompts(load, "x"))


def test_requests_come_at_their_times_whatever_became_of_others() -> None:
    def answer(connection: socket.socket, body: dict[str, Any]) -> None:
        assert body["stream"]
        connection.sendall(HEAD)
        time.sleep(SLOW_S if len(body["prompt"]) == 50 else 0.0)
        for token in range(body["max_tokens"]):
            connection.sendall(event(token))
            time.sleep(0.05)
        connection.sendall(DONE)

    batch = sends([Ask(0.0, 50, 2), Ask(0.1, 5, 4), Ask(0.2, 5, 1)], answer)
    slow, quick, short = batch.outcomes
    assert [outcome.problem for outcome in batch.outcomes] == [None] * 3
    assert SLOW_S <= slow.first_s < slow.last_s <= batch.wall_s
    assert quick.first_s < SLOW_S
    assert short.first_s < SLOW_S
    assert (len(slow.gaps), len(quick.gaps), short.gaps) == (1, 3, [])
    assert 0.04 < quick.mean_gap_s == pytest.approx(sum(quick.gaps) / 3)
    assert max(outcome.late_s for outcome in batch.outcomes) < SLOW_S


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (HEAD + event(1) + event(2) + DONE, "2 tokens came, 3 were asked for"),
        (HEAD + event(1, 2, 3), "without [DONE]"),
        (HEAD.replace(b"200 OK", b"503 No") + b"later", "503: later"),
        (b"", "the connection was lost"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(answer: bytes, words: str) -> None:
    batch = sends([Ask(0.0, 5, 3)], lambda connection, _: connection.sendall(answer))
    (outcome,) = batch.outcomes
    assert outcome.problem is not None
    assert words in outcome.problem


# ---- what it comes to ----------------------------------------------------------------------


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1) == 100
    assert percentile([3.0, 1.0], 0.99) == 3
    assert percentile([3.0], 0.5) == 3
    assert percentile([], 0.5) is None


def outcome(
    first: float, *gaps: float, prompt: int = 100, problem: str | None = None
) -> RequestOutcome:
    ask = Ask(0.0, prompt, len(gaps) + 1)
    return RequestOutcome(ask, 0.001, first, first + sum(gaps), gaps, problem)


def measured(way: str, rate: float, outcomes: list[RequestOutcome]) -> Run:
    return Run(way, rate, rate, Batch(outcomes, 10.0, 0.1))


TARGETS = Targets(first_s=1.0, gap_s=0.1)


def test_a_request_meets_its_targets_on_average_or_throughout() -> None:
    even, stalled = outcome(0.9, 0.09, 0.09), outcome(0.9, 0.01, 0.15)
    late, slow = outcome(1.1, 0.01), outcome(0.9, 0.01, 0.3)
    one_token = outcome(0.9)
    asked = [even, stalled, late, slow, one_token]
    assert [TARGETS.met_on_average(o) for o in asked] == [True, True, False, False, True]
    assert [TARGETS.met_throughout(o) for o in asked] == [True, False, False, False, True]
    assert not TARGETS.met_on_average(replace(even, problem="cut"))


def test_a_row_counts_failures_and_keeps_their_times_out() -> None:
    outcomes = [
        outcome(0.2, 0.05, 0.05),
        outcome(0.8, 0.05, 0.4, prompt=2000),
        outcome(99.0, 99.0, problem="cut"),
    ]
    found = row(measured("apart", 2, outcomes), TARGETS)
    assert (found["requests"], found["failed"]) == (3, 1)
    assert found["ttft_ms"] == {"p50": 200, "p99": 800}
    assert found["ttft_ms_by_prompt"] == {
        100: {"p50": 200, "p99": 200},
        2000: {"p50": 800, "p99": 800},
    }
    assert found["itl_ms"] == {"p50": 50, "p99": 400, "longest": 400}
    assert found["met"] == {"on_average": 0.3333, "throughout": 0.3333}
    assert found["load"] == {"late_p99_ms": 1, "cpu_share": 0.01}
    nothing = row(measured("apart", 2, outcomes[2:]), TARGETS)
    assert nothing["ttft_ms"] == {"p50": None, "p99": None}


def test_several_tokens_in_one_chunk_are_one_gap() -> None:
    bundled = RequestOutcome(Ask(0.0, 100, 7), 0.0, 0.1, 0.4, [0.1, 0.2])  # three chunks
    found = row(measured("apart", 1, [bundled]), TARGETS)
    assert found["itl_ms"] == {"p50": 100, "p99": 200, "longest": 200}
    assert found["tokens_per_chunk"] == 2.333
    assert bundled.mean_gap_s == pytest.approx(0.05)


def rows(way: str, good: dict[float, int]) -> list[dict[str, Any]]:
    """`good`: by rate, how many of ten met their targets."""
    return [
        row(measured(way, rate, [outcome(0.5, 0.01)] * met + [outcome(2.0)] * (10 - met)), TARGETS)
        for rate, met in good.items()
    ]


def test_goodput_is_the_rate_up_to_which_nine_of_ten_met_both() -> None:
    found = rows("apart", {1: 10, 2: 9, 4: 8, 8: 10}) + rows("colocated", {1: 8, 2: 10})
    found.reverse()
    assert goodput(found, "apart", "on_average") == 2
    assert goodput(found, "apart", "throughout") == 2
    assert goodput(found, "colocated", "on_average") == 0
    assert goodput(rows("apart", {1: 9, 3: 10}), "apart", "on_average") == 3


def test_ratios_are_of_the_same_rate() -> None:
    def one(way: str, rate: float, first: float, gap: float) -> dict[str, Any]:
        return row(measured(way, rate, [outcome(first, gap)]), TARGETS)

    found = [
        one("colocated", 1, 0.4, 0.3),
        one("apart", 1, 0.5, 0.1),
        one("apart-all", 2, 0.5, 0.1),
        one("apart", 2, 1.0, 0.5),
        one("colocated", 2, 2.0, 0.25),
    ]
    assert ratios(found) == [
        {"way": "apart", "rate": 1, "itl_p99": 3.0, "ttft_p99": 1.25},
        {"way": "apart-all", "rate": 2, "itl_p99": 2.5, "ttft_p99": 0.25},
        {"way": "apart", "rate": 2, "itl_p99": 0.5, "ttft_p99": 0.5},
    ]
    assert ratios([one("apart", 1, 0.5, 0.1)]) == []


def test_the_tables_show_what_failed_and_what_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = row(measured("colocated", 1, [outcome(0.0, problem="cut")] * 2), TARGETS)
    found = [broken, *rows("apart", {1: 9, 2.5: 8})]
    report = {
        "rows": found,
        "ratios": ratios(found),
        "goodput": {"apart": {"on_average": 1.0, "throughout": 0.0}},
        "targets": {"ttft_s": 1, "itl_s": 0.1},
        "cores": 2,
        "load_before": 0.5,
        "minutes": 1,
    }
    show(report, Console())
    printed = capsys.readouterr().out.replace("│", " ").splitlines()
    lines = [" ".join(line.split()) for line in printed]
    assert "1/s colocated 2 2 0 - / - - / - - 0% / 0%" in lines
    assert "1/s apart 10 0 0 500 / 2,000 10 / 10 10 90% / 90%" in lines
    assert "1/s apart - -" in lines
    assert "apart 1.00 0.00" in lines
    runs, goods = tables(report)
    assert [row["failed"] for row in runs.rows] == [2, 0, 0]
    assert goods.rows[0]["mean gap, requests/s"] == 1.0
    assert targets(report) == [None, None]  # nothing to compare with


def test_targets_are_of_apart_alone() -> None:
    ratio = {"rate": 2.0, "itl_p99": 1.9, "ttft_p99": 1.05}
    report = {"rows": [], "ratios": [{"way": "apart", **ratio}, {"way": "apart-all", **ratio}]}
    gap, first = targets(report)
    assert gap is not None
    assert first is not None
    assert (gap.at, gap.at_least, gap.met) == ("2/s", 2.0, False)
    assert (first.at_most, first.met) == (1.05, True)


# ---- the plan ------------------------------------------------------------------------------


def plan(**changes: Any) -> ServePlan:
    settings: dict[str, Any] = {
        "ways": [],
        "rates": [1.0, 2.0],
        "duration_s": 10,
        "kinds": MIX,
        "repeat_share": 0,
        "targets": TARGETS,
        "local_prefill_tokens": 64,
        "prefill_wait_share": None,
        "first_token": "decode",
        "first_token_hold_s": 0.0,
        "batched_tokens": None,
        "decode_batched_tokens": None,
        "prefill_seqs": None,
        "seed": 1,
    }
    return ServePlan(**(settings | changes))


def test_traces_are_written_without_an_engine_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    assert serve.run(plan(write_trace=path), Output()) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["load-1.jsonl", "load-2.jsonl"]
    slow, fast = plan().loads()
    assert serve_trace.read(tmp_path / "load-2.jsonl") == fast.asks
    (replayed,) = plan(trace=tmp_path / "load-1.jsonl").loads()
    assert (replayed.rate, replayed.asks) == (None, slow.asks)
    assert replayed.offered == pytest.approx(len(slow.asks) / slow.asks[-1].at)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ways": ["pigeon"]}, "--ways: pigeon — unknown; choose from colocated"),
        ({"ways": ["apart", "apart"]}, "--ways: name each way once"),
        ({"rates": [0.0]}, "--rates: each must be above 0"),
        ({"duration_s": 0.001}, "no request in 0.001 s at 1/s; raise it"),
        ({"first_token_hold_s": 0.1}, "--first-token-hold-s: needs --first-token prefill"),
        ({"kinds": [Kind(1, 16384, 1)]}, "--mix: 16385 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve.run(plan(**changes), Output())
    assert words in str(caught.value)
