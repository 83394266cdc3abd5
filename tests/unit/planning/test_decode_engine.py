"""The simulated decode engine against closed forms, and against steps taken one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.planning.loads import speeds

from disagg.planning.decode_engine import DecodeEngine
from disagg.planning.events import Clock
from disagg.planning.outcome import Gaps
from disagg.planning.speeds import Speeds

Requests = Sequence[tuple[float, int, int]]


class Watched:
    """The results of one decode engine that gets requests at their arrival times."""

    def __init__(self, of: Speeds, requests: Requests, local: Sequence[bool]) -> None:
        self.first, self.last = dict[int, float](), dict[int, float]()
        self.spread, self.gap_sum, self.gap_count = Gaps(), 0.0, 0
        clock = Clock()
        sizes = [prompt for _, prompt, _ in requests], [output for _, _, output in requests]
        engine = DecodeEngine(of.decode, of.handoff, sizes, local.__getitem__, clock, self)
        for request, (at, _, _) in enumerate(requests):
            clock.at(at, engine.add, request)
        clock.run(float("inf"))

    def first_token(self, now: float, request: int) -> None:
        self.first[request] = now

    def last_token(self, now: float, request: int) -> None:
        self.last[request] = now

    def handoff_begins(self, now: float, request: int) -> None:
        pass

    def gaps(self, first_s: float, last_s: float, count: int) -> None:
        assert count > 0
        self.spread.add(first_s, last_s, count)
        self.gap_sum += (first_s + last_s) / 2 * count
        self.gap_count += count


def one_by_one(
    of: Speeds, requests: Requests, local: Sequence[bool]
) -> tuple[dict[int, float], dict[int, float]]:
    """The same without any shortcut: each step by itself. Handoffs are all of one length and
    never wait for one another. First and last token of each request."""
    speed, takes = of.decode, of.handoff.latency_s
    first, last = dict[int, float](), dict[int, float]()
    coming, waiting = list(range(len(requests))), list[int]()
    admitted, ready = set[int](), dict[int, float]()
    prompts, made = list[list[int]](), dict[int, int]()
    now = 0.0

    def admit(at: float) -> None:
        while waiting and len(admitted) < speed.max_num_seqs:
            used = sum(requests[r][1] + requests[r][2] for r in admitted)
            request = waiting[0]
            if used + requests[request][1] + requests[request][2] > speed.kv_tokens:
                return
            admitted.add(waiting.pop(0))
            if local[request]:
                prompts.append([request, 0])
            else:
                ready[request] = at + takes

    while len(last) < len(requests):
        while coming and requests[coming[0]][0] <= now:
            waiting.append(coming.pop(0))
            admit(requests[waiting[-1]][0])
        for request in [r for r in last if r in admitted]:
            admitted.remove(request)
        admit(now)
        joined = [r for r, at in ready.items() if at <= now]
        for request in joined:
            del ready[request]
            made[request] = 0
        if not made and not prompts:
            now = min([*ready.values(), *(requests[r][0] for r in coming[:1])])
            continue
        context = sum(requests[r][1] + n for r, n in made.items())
        step_s = speed.step(len(made), context)
        room, finished = speed.max_num_batched_tokens - len(made), list[int]()
        for entry in prompts:
            part = min(requests[entry[0]][1] - entry[1], room)
            step_s += speed.prompt_token_s * part
            step_s += speed.prompt_token_context_s * part * (entry[1] + part / 2)
            entry[1] += part
            room -= part
            if entry[1] == requests[entry[0]][1]:
                finished.append(entry[0])
        prompts = [entry for entry in prompts if entry[0] not in finished]
        # A request that arrives during the step is admitted with the room at that time.
        while coming and requests[coming[0]][0] <= now + step_s:
            waiting.append(coming.pop(0))
            admit(requests[waiting[-1]][0])
        now += step_s
        for request in made:
            made[request] += 1
        for request in finished:
            made[request] = 1
        for request in list(made):
            if made[request] == 1:
                first[request] = now
            if made[request] == requests[request][2]:
                last[request] = now
                del made[request]
    return first, last


def test_a_batch_makes_a_token_a_step_each() -> None:
    of = speeds(handoff={"latency_s": 0.0, "bytes_per_s": 1e30, "parallel": 8})
    watched = Watched(of, [(0.0, 1000, 50)] * 4, [False] * 4)
    step = [0.02 + 4 * 0.001 + 1e-6 * (4 * 1000 + 4 * n) for n in range(50)]
    assert watched.first == pytest.approx(dict.fromkeys(range(4), step[0]))
    assert watched.last == pytest.approx(dict.fromkeys(range(4), sum(step)))
    assert watched.gap_count == 4 * 49
    assert watched.gap_sum == pytest.approx(4 * sum(step[1:]))


def test_gaps_within_a_stretch_have_their_own_times() -> None:
    of = speeds(decode={"context_token_s": 1e-3})
    watched = Watched(of, [(0.0, 1, 101)], [False])
    gaps = [0.021 + 1e-3 * (1 + n) for n in range(1, 101)]
    assert watched.spread.quantile(0.5) == pytest.approx(sorted(gaps)[49], rel=0.02)
    assert watched.spread.quantile(0.99) == pytest.approx(sorted(gaps)[98], rel=0.02)


def test_a_request_without_room_waits_until_another_ends() -> None:
    of = speeds(decode={"kv_tokens": 2500})
    watched = Watched(of, [(0.0, 1000, 100), (0.0, 1000, 100), (0.0, 1000, 100)], [False] * 3)
    assert watched.first[1] == pytest.approx(watched.first[0])
    left = watched.last[0]
    takes = of.handoff.takes(1000)
    assert watched.first[2] == pytest.approx(left + takes + 0.021 + 1e-3, rel=1e-6)


def test_handoffs_beyond_the_limit_take_turns() -> None:
    of = speeds(decode={"step_s": 1e-9, "sequence_s": 0.0, "context_token_s": 0.0})
    watched = Watched(of, [(0.0, 1000, 1)] * 4, [False] * 4)
    takes = of.handoff.takes(1000)
    times = [watched.first[request] for request in range(4)]
    assert times == pytest.approx([takes, takes, 2 * takes, 2 * takes], rel=1e-4)


def test_a_locally_computed_prompt_delays_running_requests() -> None:
    of = speeds()
    watched = Watched(of, [(0.0, 500, 20), (0.1, 800, 5)], [False, True])
    delayed = watched.spread.quantile(1.0)
    assert delayed > 800 * 2e-4
    undisturbed = Watched(of, [(0.0, 500, 20)], [False]).spread.quantile(1.0)
    assert undisturbed < 0.023


requests = st.lists(
    st.tuples(
        st.floats(0.0, 2.0, allow_nan=False),
        st.integers(1, 2500),
        st.integers(1, 60),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=100, deadline=None)
@given(requests, st.integers(1, 4), st.integers(2600, 9000))
def test_stretches_are_the_steps_that_they_stand_for(
    drawn: list[tuple[float, int, int, bool]], seats: int, kv_tokens: int
) -> None:
    of = speeds(
        decode={"max_num_seqs": seats, "kv_tokens": kv_tokens},
        handoff={"latency_s": 0.0123, "bytes_per_s": 1e30, "parallel": 100},
    )
    drawn = sorted(drawn)
    given_requests = [(at, prompt, output) for at, prompt, output, _ in drawn]
    local = [is_local for *_, is_local in drawn]
    watched = Watched(of, given_requests, local)
    first, last = one_by_one(of, given_requests, local)
    assert watched.first == pytest.approx(first)
    assert watched.last == pytest.approx(last)
    assert watched.gap_count == sum(output - 1 for _, _, output in given_requests)
    assert watched.gap_sum == pytest.approx(sum(last[r] - first[r] for r in first), abs=1e-9)
