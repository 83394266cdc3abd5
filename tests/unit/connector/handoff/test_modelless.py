"""Handoffs between real connectors under real schedulers, driven by our lifecycle: no model.

Control channel, leases and transports are the real ones, over loopback.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.connector.modelless import (
    BLOCK,
    PLAIN,
    PREFILL,
    VOCABULARY,
    Engine,
    Layers,
    answer,
    run,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput

from disagg.connector.handoff import follower
from disagg.connector.handoff.kv_transfer_params import INVITATION, STREAM
from disagg.connector.handoff.messages import HandoffLoad, StepReport
from disagg.transport.control.ticket import Invitation, sign
from disagg.vllm_compat.differences import RESULTS_AS_SETS

LEASE_S = 0.4
TRANSPORTS = ("process_memory", "tcp", "shared_storage")


pytestmark = pytest.mark.usefixtures("distributed")
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines with our connector; ends them."""
    started: list[Engine] = []
    storage = tmp_path_factory.mktemp("storage")

    def start(
        role: str,
        *,
        blocks: int = 48,
        layout: str = "LBHNC",
        groups: Sequence[Layers] = PLAIN,
        prefix_caching: bool = True,
        **extra: Any,
    ) -> Engine:
        config = {
            "kv_connector": "DisaggConnector",
            "kv_connector_module_path": "disagg.connector",
            "kv_role": role,
            "kv_connector_extra_config": {"storage_path": str(storage), "lease_s": 20.0, **extra},
        }
        layout_ = KVCacheLayout[layout]
        started.append(
            Engine(
                model,
                config,
                blocks=blocks,
                layout=layout_,
                groups=groups,
                prefix_caching=prefix_caching,
            )
        )
        return started[-1]

    yield start
    for engine in started:
        engine.close()


STATES = (Layers(state=True), Layers())
MIXED = (Layers(window=70), Layers(block=2 * BLOCK), Layers(window=5 * BLOCK))
"""As Gemma 4: groups whose blocks have as many bytes, and not as many tokens."""


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def held(engine: Engine) -> int:
    """Leases that the worker keeps."""
    producer = engine.lifecycle.connector.worker.producer
    if producer is None:
        return 0
    producer._leases.check_integrity()
    return int(producer._leases.held())


def at_rest(*engines: Engine) -> bool:
    """Whether no engine has a load or a lease left."""
    return all(
        engine.is_idle()
        and held(engine) == 0
        and not engine.connector.scheduler.consumer._loads
        and not engine.connector.scheduler.consumer._reports
        and not getattr(engine.connector.scheduler.producer, "_leases", None)
        and not engine.lifecycle.connector.worker.consumer._cancelled
        for engine in engines
    )


# ---- one handoff ---------------------------------------------------------------------------


WAYS = [(transport, layout) for transport in TRANSPORTS for layout in ("LBHNC", "BLHNC")]


@pytest.mark.parametrize(("transport", "layout"), [*WAYS, ("process_memory", "BHLNC")])
def test_a_whole_handoff(start: Start, transport: str, layout: str) -> None:
    producer = start("kv_producer", layout=layout, transports=[transport])
    consumer = start("kv_consumer", layout=layout, transports=[transport])
    prompt = prompt_of(5 * BLOCK + 7, seed=1)

    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: first in producer.finished)
    params = producer.params[first]
    theirs = params["remote_block_ids"][0]
    run([producer], lambda: held(producer) == 1)  # the worker hears of it one step later
    assert not producer.is_idle()

    second = consumer.add(prompt, 3, params)
    run([consumer], lambda: bool(consumer.scheduler.running))
    ours = consumer.block_ids(second)[: len(theirs)]
    assert len(theirs) == 6
    for sent, received in zip(producer.bytes_of(theirs), consumer.bytes_of(ours), strict=True):
        # Behind the last block's seven tokens comes the answer.
        assert torch.equal(sent[:-1], received[:-1])
        assert torch.equal(sent[-1][:, :7], received[-1][:, :7])
    run([producer, consumer], lambda: second in consumer.finished and at_rest(producer, consumer))
    assert consumer.untouched(but=ours)
    assert consumer.answers[second] == answer(prompt, 3)
    assert consumer.answers[second][:1] == producer.answers[first]
    loads = [output for output in consumer.seen if output.finished_recving]
    assert [output.finished_recving for output in loads] == [{second}]
    assert not loads[0].failed_recving
    assert [o.finished_sending for o in producer.seen if o.finished_sending] == [{first}]


@pytest.mark.parametrize("groups", [PLAIN, (Layers(window=2 * BLOCK), Layers()), MIXED])
@pytest.mark.parametrize("length", [BLOCK - 1, 4 * BLOCK, 5 * BLOCK + 7])
@pytest.mark.parametrize("more", [1, BLOCK + 3])
def test_a_prompt_that_goes_on_behind_the_leases(
    start: Start, groups: Sequence[Layers], length: int, more: int
) -> None:
    """All of the lease's tokens are loaded, not whole blocks alone; another tail is none of its."""
    producer, consumer = start("kv_producer", groups=groups), start("kv_consumer", groups=groups)
    prompt = prompt_of(length, seed=length + more)
    longer = [*prompt, *prompt_of(more, seed=7)]
    other = [*prompt[:-1], (prompt[-1] + 1) % VOCABULARY, *longer[length:]]
    firsts = [producer.add(prompt, 1, PREFILL) for _ in range(2)]
    run([producer], lambda: set(firsts) <= set(producer.finished))
    asked = [
        consumer.add(ids, 3, producer.params[first])
        for ids, first in zip((longer, other), firsts, strict=True)
    ]
    run([producer, consumer], lambda: set(asked) <= set(consumer.finished))
    assert [consumer.answers[name] for name in asked] == [
        answer(ids, 3, groups) for ids in (longer, other)
    ]
    work = [step.kv_connector_metadata for step in consumer.scheduled]
    ends = {
        load.request_id: max(stop for _, stop in load.spans) for each in work for load in each.loads
    }
    theirs = [-(-length // group.block) for group in groups]
    assert ends[asked[0]] == sum(theirs), "to the end of the last group's blocks"
    assert ends.get(asked[1], 0) < theirs[0], "its last block is another one"


def has_states(engine: Engine) -> bool:
    return any(group.state for group in engine.groups)


def test_the_next_turn_moves_what_is_new(start: Start) -> None:
    """The consumer has no state of the turn before, and all blocks of attention."""
    producer, consumer = start("kv_producer", groups=STATES), start("kv_consumer", groups=STATES)
    prompt = prompt_of(3 * BLOCK + 5, seed=40)
    handoff_all(producer, consumer, [prompt], 2 * BLOCK)
    said = next(iter(consumer.answers.values()))
    since = len(consumer.scheduled)
    handoff_all(producer, consumer, [[*prompt, *said, *prompt_of(BLOCK, seed=41)]], 4)
    (load,) = [
        load for step in consumer.scheduled[since:] for load in step.kv_connector_metadata.loads
    ]
    assert len(load.block_ids) == 2 + 1
    computed = sum(step.total_num_scheduled_tokens for step in consumer.scheduled[since:])
    assert computed == 4


def handoff_all(
    producer: Engine, consumer: Engine, prompts: Sequence[list[int]], count: int
) -> None:
    """All at once; the answers are right, and nothing is left."""
    firsts = [producer.add(prompt, 1, PREFILL) for prompt in prompts]
    run([producer], lambda: set(firsts) <= set(producer.finished))
    seconds = [
        consumer.add(prompt, count, producer.params[first])
        for prompt, first in zip(prompts, firsts, strict=True)
    ]
    run([producer, consumer], lambda: set(seconds) <= set(consumer.finished))
    run([producer, consumer], lambda: at_rest(producer, consumer))
    expected = [answer(prompt, count, consumer.groups) for prompt in prompts]
    assert [consumer.answers[name] for name in seconds] == expected


def test_many_at_once(start: Start) -> None:
    """More than the consumer has blocks for: some wait, and some are preempted."""
    producer, consumer = start("kv_producer", blocks=160), start("kv_consumer", blocks=36)
    prompts = [prompt_of(20 + 17 * n, seed=n) for n in range(16)]
    handoff_all(producer, consumer, prompts, 40)
    assert not any(output.failed_recving for output in consumer.seen)
    assert any(scheduled.preempted_req_ids for scheduled in consumer.scheduled)


def test_loads_do_not_wait_for_each_other(start: Start) -> None:
    """Of each prompt, three blocks are loaded and one is to be computed; there are six."""
    groups = (Layers(window=3 * BLOCK + 1),)
    producer = start("kv_producer", blocks=64, groups=groups)
    consumer = start("kv_consumer", blocks=1 + 6, groups=groups)
    prompts = [prompt_of(9 * BLOCK + 1, seed=n) for n in range(3)]
    handoff_all(producer, consumer, prompts, 4)
    assert sum(len(output.finished_recving or ()) for output in consumer.seen) == 3


def test_a_load_that_fails_has_room_to_start_over(start: Start) -> None:
    """Then its window's blocks are computed too. Loaded requests behind it hold the rest, and vLLM
    schedules them after it."""
    groups = (Layers(window=2 * BLOCK), Layers())
    producer = start("kv_producer", blocks=64, groups=groups)
    consumer = start("kv_consumer", blocks=1 + 12, groups=groups)
    prompts = [prompt_of(length, seed=length) for length in (4 * BLOCK, BLOCK + 2, BLOCK - 7)]
    firsts = [producer.add(prompt, 1, PREFILL) for prompt in prompts]
    run([producer], lambda: held(producer) == 3)
    producer.lifecycle.connector.worker.producer._leases.release(0, "aborted")
    asked = [
        consumer.add(prompt, 2, producer.params[first])
        for prompt, first in zip(prompts, firsts, strict=True)
    ]
    run([producer, consumer], lambda: set(asked) <= set(consumer.finished))
    run([producer, consumer], lambda: at_rest(producer, consumer))
    assert [consumer.answers[name] for name in asked] == [answer(p, 2, groups) for p in prompts]
    assert sum(len(output.failed_recving) for output in consumer.seen) == 1


def test_a_producer_that_hangs_holds_up_no_other(start: Start) -> None:
    """It is connected and does not answer; more loads wait for it than may run at once."""
    more = {"transports": ["tcp"]}
    hung, well = start("kv_producer", **more), start("kv_producer", **more)
    consumer = start("kv_consumer", load_threads=2, **more)
    prompts = [prompt_of(100, seed=n) for n in range(5)]
    firsts = [(hung, hung.add(prompt, 1, PREFILL)) for prompt in prompts[:4]]
    firsts.append((well, well.add(prompts[4], 1, PREFILL)))
    run([hung, well], lambda: held(hung) == 4 and held(well) == 1)
    asked = [
        (prompt, producer.params[first])
        for prompt, (producer, first) in zip(prompts, firsts, strict=True)
    ]
    with hung.lifecycle.connector.worker.producer._leases._changed:
        stuck = [consumer.add(prompt, 2, params) for prompt, params in asked[:4]]
        run([consumer], lambda: len(consumer.lifecycle.connector.worker.consumer._cancelled) == 4)
        other = consumer.add(prompts[4], 2, asked[4][1])
        run([well, consumer], lambda: other in consumer.finished)
        assert not set(stuck) & set(consumer.finished)
    run([hung, well, consumer], lambda: set(stuck) <= set(consumer.finished))
    run([hung, well, consumer], lambda: at_rest(hung, well, consumer))
    assert [consumer.answers[name] for name in (*stuck, other)] == [answer(p, 2) for p in prompts]
    assert not any(output.failed_recving for output in consumer.seen)


def test_a_lease_that_ran_out(start: Start) -> None:
    producer = start("kv_producer", lease_s=0.1)
    consumer = start("kv_consumer")
    prompt = prompt_of(100, seed=3)
    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: first in producer.finished)
    run([producer], lambda: at_rest(producer))
    second = consumer.add(prompt, 2, producer.params[first])
    run([producer, consumer], lambda: second in consumer.finished)
    run([producer, consumer], lambda: at_rest(producer, consumer))
    assert consumer.answers[second] == answer(prompt, 2)
    assert [o.failed_recving for o in consumer.seen if o.failed_recving] == [{second}]


class Clock:
    """The time, and as much later as a test says."""

    later = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.later


@pytest.mark.parametrize("waits_s", [15, 60])
def test_a_request_that_waits_keeps_its_lease(start: Start, waits_s: int) -> None:
    """Its engine has no room for it for two or three times the lease's length."""
    producer, consumer = start("kv_producer", lease_s=20.0), start("kv_consumer", blocks=19)
    clock = Clock()
    leases = producer.lifecycle.connector.worker.producer._leases
    leases._clock = consumer.connector.scheduler.consumer._clock = clock
    prompt = prompt_of(300, seed=6)
    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: held(producer) == 1)
    busy = consumer.add(prompt_of(400, seed=7), 90, None)
    run([consumer], lambda: len(consumer.answers[busy]) > 0)
    second = consumer.add(prompt, 2, producer.params[first])
    for _ in range(4):
        clock.later += waits_s / 4
        deadline = leases._leases[0].deadline
        consumer.step()
        producer.step()
        if waits_s > 20:
            run([producer], lambda: leases._leases[0].deadline > deadline)  # noqa: B023
    assert second not in consumer.finished
    assert busy not in consumer.finished
    run([producer, consumer], lambda: second in consumer.finished)
    run([producer, consumer], lambda: at_rest(producer, consumer))
    assert consumer.answers[second] == answer(prompt, 2)
    assert consumer.counts["handoffs|process_memory|loaded"] == 1


def finished(asked: Sequence[tuple[Engine, str]]) -> bool:
    return all(name in engine.finished for engine, name in asked)


def test_engines_that_wait_for_each_others_blocks(start: Start) -> None:
    """Each keeps blocks that the other's loads need. One of them has to yield, and loses little."""
    left, right = engines = [start("kv_both", blocks=33) for _ in range(2)]
    for turn in range(2):
        prompts = [prompt_of(320, seed=50 + 6 * turn + number) for number in range(6)]
        legs = [(left, right, prompt) for prompt in prompts[:3]]
        legs += [(right, left, prompt) for prompt in prompts[3:]]
        first = [(engine, engine.add(prompt, 1, PREFILL)) for engine, _, prompt in legs]
        run(engines, partial(finished, first))
        run(engines, lambda: [held(engine) for engine in engines] == [3, 3])
        second = [
            (decode, decode.add(prompt, 2, engine.params[name]))
            for (engine, decode, prompt), (_, name) in zip(legs, first, strict=True)
        ]
        run(engines, partial(finished, second))
        run(engines, lambda: at_rest(*engines))
        for (engine, name), prompt in zip(second, prompts, strict=True):
            assert engine.answers[name] == answer(prompt, 2)
    taken_back = sum(engine.counts["leases|taken_back"] for engine in engines)
    # One of a turn's six prompts is computed twice, or two; a few more if the machine stumbles.
    assert 2 <= taken_back < 12
    assert sum(engine.counts["failures|lease_gone"] for engine in engines) == taken_back


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_several_answers_to_one_prompt(start: Start, prefix_caching: bool) -> None:
    """n > 1: one request fetches; the others find its blocks, or are counted as computed."""
    producer, consumer = start("kv_producer"), start("kv_consumer", prefix_caching=prefix_caching)
    prompt = prompt_of(100, seed=8)
    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: first in producer.finished)
    names = [consumer.add(prompt, 2, producer.params[first]) for _ in range(3)]
    run([producer, consumer], lambda: all(name in consumer.finished for name in names))
    run([producer, consumer], lambda: at_rest(producer, consumer))
    assert [consumer.answers[name] for name in names] == [answer(prompt, 2)] * 3
    others = "handoffs|none|local_hit" if prefix_caching else "handoffs|none|computed"
    counted = {name: count for name, count in consumer.counts.items() if "handoffs" in name}
    assert counted == {"handoffs|process_memory|loaded": 1, others: 2}


def test_what_strict_refuses_stays_refused(start: Start) -> None:
    """Also if another request, which this lease serves, ends the lease."""
    producer, consumer = start("kv_producer"), start("kv_consumer", strict=True)
    prompt, other = prompt_of(3 * BLOCK + 5, seed=60), prompt_of(3 * BLOCK + 5, seed=61)
    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: first in producer.finished)
    served, refused = (consumer.add(p, 3, producer.params[first]) for p in (prompt, other))
    run([producer, consumer], lambda: {served, refused} <= set(consumer.finished))
    assert consumer.answers[served] == answer(prompt, 3)
    assert (consumer.finished[refused], consumer.answers[refused]) == ("error", [])
    run([producer, consumer], lambda: at_rest(producer, consumer))


def reset(engine: Engine) -> bool:
    """As after a weight update: everything computed before is invalid."""
    return bool(engine.scheduler.reset_prefix_cache(reset_connector=True))


def test_nobody_fetches_what_was_computed_before_a_reset(start: Start) -> None:
    producer, consumer = start("kv_producer", lease_s=600.0), start("kv_consumer")
    prompt = prompt_of(100, seed=4)
    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: held(producer) == 1)
    assert not reset(producer), "its blocks are held; whoever asks is to ask again"
    run([producer], lambda: at_rest(producer))
    assert reset(producer)
    second = consumer.add(prompt, 2, producer.params[first])
    run([producer, consumer], lambda: second in consumer.finished)
    assert consumer.answers[second] == answer(prompt, 2)
    assert [o.failed_recving for o in consumer.seen if o.failed_recving] == [{second}]
    third = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: held(producer) == 1)
    assert reset(consumer)
    fourth = consumer.add(prompt, 2, producer.params[third])
    run([producer, consumer], lambda: fourth in consumer.finished and at_rest(producer, consumer))
    assert [o.finished_recving for o in consumer.seen if o.finished_recving][1:] == [{fourth}]
    assert sum(len(o.failed_recving) for o in consumer.seen) == 1


@contextlib.contextmanager
def loads_wait(consumer: Engine) -> Iterator[None]:
    """Loads submitted within the context start at its end."""
    worker, waiting = consumer.lifecycle.connector.worker.consumer, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker._loads, "submit", lambda *work: waiting.append(work))
        yield
    for work in waiting:
        worker._loads.submit(*work)


def load_without_report(producer: Engine, consumer: Engine) -> None:
    """Step the consumer once; its load has ended then, without having been reported."""
    with loads_wait(consumer):
        consumer.step()
    run([producer], lambda: not consumer.lifecycle.connector.worker.consumer._ended.empty())


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_consumer_that_is_reset_takes_nothing_of_before(start: Start, steps: int) -> None:
    """Neither queued loads nor loads under way."""
    producer, consumer = start("kv_producer"), start("kv_consumer")
    prompt = prompt_of(100, seed=5)
    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: held(producer) == 1)
    second = consumer.add(prompt, 2, producer.params[first])
    if steps == 2:
        load_without_report(producer, consumer)
    with loads_wait(consumer):
        if steps == 1:
            consumer.step()
        reset(consumer)
    run([producer, consumer], lambda: second in consumer.finished and at_rest(producer, consumer))
    assert consumer.answers[second] == answer(prompt, 2)
    loads = sum(len(o.finished_recving or ()) for o in consumer.seen)
    assert loads == sum(len(o.failed_recving) for o in consumer.seen) == (steps > 0)


def test_results_survive_a_forward_pass_that_raises(start: Start) -> None:
    producer, consumer = start("kv_producer"), start("kv_consumer")
    prompt = prompt_of(70, seed=4)
    first = producer.add(prompt, 1, PREFILL)
    run([producer], lambda: first in producer.finished)
    second = consumer.add(prompt, 2, producer.params[first])
    load_without_report(producer, consumer)
    connector = consumer.lifecycle.connector
    scheduled = consumer.scheduler.schedule()
    with pytest.raises(ZeroDivisionError), consumer.lifecycle.step(scheduled) as step:
        _ = 1 // 0
    assert not connector.has_connector_metadata()
    assert step.output.finished_recving == {second}
    ran = ModelRunnerOutput.with_kv_conn_output_only(step.output)
    consumer.scheduler.update_from_output(scheduled, ran)
    run([producer, consumer], lambda: second in consumer.finished)
    run([producer, consumer], lambda: at_rest(producer, consumer))
    assert consumer.answers[second] == answer(prompt, 2)


# ---- leases that grow --------------------------------------------------------------------------


@dataclass
class Followed:
    """A prompt whose two legs are sent at once. Each step of the producer computes 128 tokens."""

    producer: Engine
    consumer: Engine
    prompt: list[int]
    groups: Sequence[Layers] = PLAIN
    stream: str = "5" * 32
    first: str = ""
    second: str = ""

    def prefill(self) -> None:
        params = {**PREFILL, STREAM: self.stream}
        self.first = self.producer.add(self.prompt, 1, params)

    def decode(self, count: int = 3) -> str:
        invited = invitation(self.producer)
        params = {"do_remote_prefill": True, INVITATION: invited, STREAM: self.stream}
        self.second = self.consumer.add(self.prompt, count, params)
        return self.second

    def begins(self) -> None:
        """Until decode has blocks for the prompt, whose first step is done."""
        self.producer.step()
        run([self.consumer], lambda: bool(loads(self.consumer)))

    def gets_on(self) -> None:
        """One more step of the prompt; decode fetches what the step before it has computed."""
        before = moved(self.consumer)
        self.producer.step()
        run([self.consumer], lambda: moved(self.consumer) > before)

    def ends(self) -> None:
        """Everything, and rightly."""
        engines = self.producer, self.consumer
        run(engines, lambda: self.second in self.consumer.finished)
        run(engines, lambda: at_rest(*engines) and not growing(self.producer))
        count = len(self.consumer.answers[self.second])
        assert self.consumer.answers[self.second] == answer(self.prompt, count, self.groups)

    def computed(self) -> int:
        """Tokens that decode has computed."""
        steps = self.consumer.scheduled
        return sum(step.num_scheduled_tokens.get(self.second, 0) for step in steps)


def invitation(producer: Engine) -> dict[str, Any]:
    """As the router has it of an earlier answer."""
    half = producer.connector.scheduler.producer
    engine, host = half._engine, half._endpoints
    invited = Invitation(engine.engine_id, host, half._layers, engine.block_size)
    return {"ticket": sign(invited, half._secret), "step_tokens": 128}


def loads(engine: Engine) -> list[HandoffLoad]:
    """All that were begun."""
    work = [step.kv_connector_metadata for step in engine.scheduled]
    return [load for each in work for load in each.loads]


def reports(engine: Engine) -> list[StepReport]:
    """All of its worker's."""
    found = [output.kv_connector_worker_meta for output in engine.seen]
    return [one for one in found if isinstance(one, StepReport)]


def moved(engine: Engine) -> int:
    """How often its loads got on while the prompt was computed, or after."""
    return sum(len(one.moved) for one in reports(engine))


def outcomes(engine: Engine) -> list[str]:
    """How its loads and its leases ended."""
    found = reports(engine)
    loads = [load.outcome for one in found for load in one.loads]
    return loads + [lease.outcome for one in found for lease in one.leases]


def growing(engine: Engine) -> int:
    """Leases that the worker has, granted or not, and their streams."""
    leases = engine.lifecycle.connector.worker.producer._leases
    return len(leases._leases) + len(leases._streams)


def begun_anew(engine: Engine) -> int:
    """How often its leases did."""
    work = [step.kv_connector_metadata for step in engine.scheduled]
    return sum(not grown.blocks for each in work for grown in each.grown)


WINDOW = (Layers(window=2 * BLOCK), Layers())


@pytest.mark.parametrize(
    ("groups", "transport"),
    [
        *[(PLAIN, transport) for transport in TRANSPORTS],
        *[(groups, "process_memory") for groups in (WINDOW, STATES, MIXED)],
    ],
)
def test_a_prompt_is_followed(start: Start, groups: Sequence[Layers], transport: str) -> None:
    """What a step computes is there before the whole prompt is."""
    more: dict[str, Any] = {"groups": groups, "transports": [transport]}
    producer, consumer = start("kv_producer", **more), start("kv_consumer", **more)
    pair = Followed(producer, consumer, prompt_of(13 * BLOCK + 7, seed=91), groups)
    pair.prefill()
    pair.decode()
    pair.begins()
    for _ in range(2):
        pair.gets_on()
        assert pair.first not in pair.producer.finished
    pair.ends()
    assert len(loads(pair.consumer)) == 1
    assert pair.computed() == 1 + 2
    assert pair.consumer.counts[f"handoffs|{transport}|loaded"] == 1
    hidden, all_ = (pair.consumer.counts[f"{family}|{transport}"] for family in ("hidden", "bytes"))
    assert 0 < hidden < all_
    assert outcomes(pair.producer) == ["fetched"]


def test_decode_keeps_no_blocks_before_prefill_begins(start: Start) -> None:
    """However often it is asked; other requests run meanwhile."""
    pair = Followed(start("kv_producer"), start("kv_consumer"), prompt_of(300, seed=92))
    pair.decode()
    other = pair.consumer.add(prompt_of(40, seed=93), 20, None)
    run([pair.consumer], lambda: other in pair.consumer.finished)
    assert pair.consumer.block_ids(pair.second) == []
    pair.prefill()
    pair.ends()
    assert pair.computed() == 1 + 2


def test_decode_comes_when_the_prompt_is_computed(start: Start) -> None:
    pair = Followed(start("kv_producer"), start("kv_consumer"), prompt_of(300, seed=94))
    pair.prefill()
    run([pair.producer], lambda: held(pair.producer) == 1)
    pair.decode()
    pair.ends()
    assert pair.computed() == 1 + 2
    counts = pair.consumer.counts
    assert counts["handoffs|process_memory|loaded"] == 1
    assert counts["hidden|process_memory"] == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("groups", "room"), [(PLAIN, 12), (WINDOW, 20)])
def test_a_prompt_that_loses_its_blocks_is_fetched_anew(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    groups: Sequence[Layers],
    room: int,
    prefix_caching: bool,
) -> None:
    """Beside it, an answer grows into the block that its third step needs."""
    monkeypatch.setattr(follower, "_ANEW_S", 60.0)
    more: dict[str, Any] = {"groups": groups, "prefix_caching": prefix_caching}
    producer = start("kv_producer", blocks=1 + room, **more)
    pair = Followed(producer, start("kv_consumer", groups=groups), prompt_of(330, seed=95), groups)
    other = producer.add(prompt_of(30, seed=96), 20, None)
    producer.step()
    producer.step()
    pair.prefill()
    pair.decode()
    pair.begins()
    pair.gets_on()
    run([producer], lambda: begun_anew(producer) > 0)
    pair.ends()
    assert begun_anew(producer) == 1
    assert producer.answers[other] == answer(prompt_of(30, seed=96), 20, groups)
    assert pair.consumer.counts["handoffs|process_memory|loaded"] == 1
    assert pair.computed() == 1 + 2


@pytest.mark.parametrize(("groups", "kept"), [(PLAIN, 4 * BLOCK), (WINDOW, 0)])
@pytest.mark.parametrize("end", ["abort", "reset", "death"])
def test_a_prompt_that_prefill_does_not_finish(
    start: Start, groups: Sequence[Layers], kept: int, end: str
) -> None:
    """If prefill dies, decode computes what it has not fetched; with windows, and if the lease
    ends, the whole prompt: prefill may have new weights."""
    engines = start("kv_producer", groups=groups), start("kv_consumer", groups=groups)
    pair = Followed(*engines, prompt_of(500, seed=97), groups)
    pair.prefill()
    pair.decode()
    pair.begins()
    pair.gets_on()
    pair.gets_on()
    if end == "death":
        pair.producer.close()
        run([pair.consumer], lambda: pair.second in pair.consumer.finished)
        assert pair.consumer.counts["failures|peer_lost"] == 1
        assert pair.consumer.answers[pair.second] == answer(pair.prompt, 3, groups)
        assert pair.computed() == 500 - kept + 2
        return
    if end == "abort":
        pair.producer.abort(pair.first)
    else:
        reset(pair.producer)
        pair.producer.step()
    run(engines, lambda: pair.second in pair.consumer.finished)
    if end == "reset":
        # Its lease of after the reset serves whoever has its answer.
        run([pair.producer], lambda: held(pair.producer) == 1)
        pair.consumer.add(pair.prompt, 1, pair.producer.params[pair.first])
    pair.ends()
    assert pair.consumer.counts["failures|lease_gone"] == 1
    assert pair.computed() == 500 + 2
    invalid = [output.invalid_block_ids for output in pair.consumer.seen]
    # Without results of whole requests, a version is told all blocks of the load.
    assert any(invalid) == RESULTS_AS_SETS.here


def test_a_consumer_that_leaves_ends_the_lease(start: Start) -> None:
    """While the prompt is computed. Its own prefill goes on until its client leaves, too."""
    pair = Followed(start("kv_producer"), start("kv_consumer"), prompt_of(500, seed=98))
    pair.prefill()
    pair.decode()
    pair.begins()
    pair.gets_on()
    pair.consumer.abort(pair.second)
    engines = pair.producer, pair.consumer
    run(engines, lambda: pair.first in pair.producer.finished)
    run(engines, lambda: at_rest(*engines) and not growing(pair.producer))
    assert outcomes(pair.producer) == outcomes(pair.consumer) == ["aborted"]


def test_a_consumer_that_is_reset_amid_the_prompt_computes_it(start: Start) -> None:
    pair = Followed(start("kv_producer"), start("kv_consumer"), prompt_of(500, seed=99))
    pair.prefill()
    pair.decode()
    pair.begins()
    pair.gets_on()
    reset(pair.consumer)
    pair.ends()
    assert pair.computed() == 500 + 2


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_several_answers_follow_one_prompt(start: Start, prefix_caching: bool) -> None:
    consumer = start("kv_consumer", prefix_caching=prefix_caching)
    pair = Followed(start("kv_producer"), consumer, prompt_of(300, seed=89))
    pair.prefill()
    names = [pair.decode(2) for _ in range(3)]
    pair.begins()
    pair.gets_on()
    run([pair.producer, consumer], lambda: set(names) <= set(consumer.finished))
    pair.ends()
    assert [consumer.answers[name] for name in names] == [answer(pair.prompt, 2)] * 3
    others = "handoffs|none|local_hit" if prefix_caching else "handoffs|none|computed"
    counted = {name: count for name, count in consumer.counts.items() if "handoffs" in name}
    assert counted == {"handoffs|process_memory|loaded": 1, others: 2}


# ---- vLLM's own connectors ---------------------------------------------------------------------


def test_vllms_example_connector(model: Path, tmp_path: Path) -> None:
    """It loads before the forward pass and saves layer by layer, where ours does neither."""
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    writer, reader = Engine(model, config), Engine(model, config)
    prompt = prompt_of(3 * BLOCK + 2, seed=5)
    one = writer.add(prompt, 2, None)
    run([writer], lambda: one in writer.finished)
    other = reader.add(prompt, 2, None)
    run([reader], lambda: other in reader.finished)
    assert reader.scheduled[0].has_sync_kv_loads
    assert reader.scheduled[0].num_scheduled_tokens == {other: 2}
    assert reader.answers[other] == writer.answers[one] == answer(prompt, 2)
    for engine in (writer, reader):
        engine.step()
        assert engine.is_idle()
        engine.close()


# ---- any order of events -----------------------------------------------------------------------


@dataclass
class Scene:
    """A pair that lives for all examples, and what its clients wait for."""

    producer: Engine
    consumer: Engine
    prefilling: dict[str, list[int]] = field(default_factory=dict)
    params: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    decoding: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def step(self, engine: Engine) -> None:
        engine.step()
        for name in [name for name in self.prefilling if name in self.producer.finished]:
            prompt = self.prefilling.pop(name)
            computed = prompt[:-1] if has_states(self.producer) and len(prompt) > 1 else prompt
            assert self.producer.answers[name] == answer(computed, 1, self.producer.groups)
            if name in self.producer.params:  # not of one token beside states
                self.params.append((prompt, self.producer.params[name]))
        for name in [name for name in self.decoding if name in self.consumer.finished]:
            prompt, count = self.decoding.pop(name)
            assert self.consumer.answers[name] == answer(prompt, count, self.consumer.groups)
            self.count("answered")

    def settle(self) -> None:
        """All that was asked for is answered, all else runs out."""
        self.params.clear()
        deadline = time.monotonic() + 20
        while self.decoding or self.prefilling or not at_rest(self.producer, self.consumer):
            assert time.monotonic() < deadline, "something is still pending"
            self.step(self.producer)
            self.step(self.consumer)
            self.params.clear()
        for engine in (self.producer, self.consumer):
            assert engine.scheduler.reset_prefix_cache()


PROMPTS = [prompt_of(length, seed=100 + length) for length in (1, 31, 32, 33, 64, 90, 130, 200)]
# Prompts that begin alike, so that prefix caches and shared blocks take part.
PROMPTS += [PROMPTS[-1][:100] + prompt_of(40, seed=200), PROMPTS[-1][:64]]


class Clients:
    """Clients that ask, leave and come late; each method is one thing that may happen."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene, self.random = scene, random.Random(seed)

    def prefill(self) -> None:
        prompt = self.random.choice(PROMPTS)
        self.scene.prefilling[self.scene.producer.add(prompt, 1, PREFILL)] = prompt

    def prefill_leaves(self) -> None:
        if name := self._any(self.scene.prefilling):
            del self.scene.prefilling[name]
            self.scene.producer.abort(name)
            self.scene.count("prefill aborted")

    def decode(self) -> None:
        self._decode(self.scene.params.pop)

    def decode_and_keep_the_params(self) -> None:
        self._decode(self.scene.params.__getitem__)

    def _decode(self, take: Callable[[int], tuple[list[int], dict[str, Any]]]) -> None:
        if self.scene.params:
            prompt, params = take(self.random.randrange(len(self.scene.params)))
            count = self.random.randrange(1, 4)
            self.scene.decoding[self.scene.consumer.add(prompt, count, params)] = (prompt, count)

    def decode_of_another_prompt(self) -> None:
        if self.scene.params:
            prompt, (_, params) = self.random.choice(PROMPTS), self.random.choice(self.scene.params)
            self.scene.decoding[self.scene.consumer.add(prompt, 1, params)] = (prompt, 1)

    def decode_leaves(self) -> None:
        if name := self._any(self.scene.decoding):
            del self.scene.decoding[name]
            self.scene.consumer.abort(name)
            self.scene.count("decode aborted")

    def producer_is_reset(self) -> None:
        reset(self.scene.producer)

    def consumer_is_reset(self) -> None:
        reset(self.scene.consumer)

    def producer_steps(self) -> None:
        self.scene.step(self.scene.producer)

    def consumer_steps(self) -> None:
        self.scene.step(self.scene.consumer)

    def time_passes(self) -> None:
        time.sleep(self.random.choice([0.001, 0.01, LEASE_S / 2]))

    def _any(self, names: Collection[str]) -> str | None:
        return self.random.choice(list(names)) if names else None


EVENTS = {
    Clients.prefill: 6,
    Clients.prefill_leaves: 1,
    Clients.decode: 6,
    Clients.decode_and_keep_the_params: 1,
    Clients.decode_of_another_prompt: 1,
    Clients.decode_leaves: 2,
    Clients.producer_steps: 12,
    Clients.consumer_steps: 12,
    Clients.producer_is_reset: 1,
    Clients.consumer_is_reset: 1,
    Clients.time_passes: 1,
}


@pytest.fixture(scope="module", params=[PLAIN, STATES, MIXED], ids=["plain", "states", "mixed"])
def scene(start: Start, request: pytest.FixtureRequest) -> Scene:
    return Scene(
        start("kv_producer", blocks=40, lease_s=LEASE_S, groups=request.param),
        start("kv_consumer", blocks=40, groups=request.param),
    )


# One test for all seeds: what they meet together is known only where none runs elsewhere.
def test_any_order_of_events(scene: Scene) -> None:
    for seed in range(6):
        clients = Clients(scene, seed)
        try:
            for event in clients.random.choices(list(EVENTS), list(EVENTS.values()), k=150):
                event(clients)
            scene.settle()
        except BaseException as error:
            error.add_note(f"with seed {seed}")
            raise
    seen = scene.consumer.seen
    scene.counts["loaded"] = sum(len(output.finished_recving or ()) for output in seen)
    scene.counts["failed"] = sum(len(output.failed_recving) for output in seen)
    for what in ("answered", "prefill aborted", "decode aborted", "loaded", "failed"):
        assert scene.counts.get(what, 0) > 0, f"the events never include: {what}"
