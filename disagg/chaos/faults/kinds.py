"""The kinds of faults. Each one is played by a small driver that speaks as a router does.

A kind is a function of the engines and a number of times. It returns the outcome of each answer
that counts. The engines serve when it begins; whoever calls it looks whether they still do.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from disagg.chaos.faults import streamed
from disagg.chaos.faults.connectors import LEASE_S, REQUEST_ID, Params
from disagg.chaos.faults.engines import LONGEST, Engines, NotPlayed, Outcome, Task
from disagg.testing.vllm_server import VllmServer

Play = Callable[[Engines, int], list[Outcome]]
_SHORT, _MIDDLE, _LONG = 100, 300, 900


def handoffs(engines: Engines, times: int) -> list[Outcome]:
    """One after the other."""
    return engines.alone([partial(engines.handoff, engines.prompts(_MIDDLE)) for _ in range(times)])


def handoffs_at_once(engines: Engines, times: int) -> list[Outcome]:
    """Sixteen clients."""
    prompts = [engines.prompts(_SHORT + 20 * number) for number in range(max(16, times))]
    return engines.together([partial(engines.handoff, prompt) for prompt in prompts])


# ---- references that are not what they should be -----------------------------------------------


def _with_params(
    engines: Engines, times: int, change: Callable[[Params], Params | None]
) -> list[Outcome]:
    def one(prompt: list[int]) -> list[Outcome]:
        expected, params = engines.expected(prompt), _params(engines, prompt)
        return engines.decode(prompt, change(params), expected)

    return engines.alone([partial(one, engines.prompts(_MIDDLE)) for _ in range(times)])


def _params(engines: Engines, prompt: Any, server: VllmServer | None = None) -> Params:
    params = engines.prefill(prompt, server)
    if params is None:
        raise NotPlayed("no params: a prompt's tokens are its reference")
    return params


def unknown_reference(engines: Engines, times: int) -> list[Outcome]:
    """Of a request that never was."""

    def change(params: Params) -> Params:
        found = {key: value for key, value in params.items() if key in _NAMES}
        changed = {key: f"{value[:-8]}{uuid.uuid4().hex[:8]}" for key, value in found.items()}
        return {**params, **changed}

    return _with_params(engines, times, change)


_NAMES = ("remote_request_id", "transfer_id", "disagg", REQUEST_ID)


def consumed_reference(engines: Engines, times: int) -> list[Outcome]:
    """Used a second time."""

    def one(prompt: list[int]) -> list[Outcome]:
        expected, params = engines.expected(prompt), _params(engines, prompt)
        engines.decode(prompt, params, expected)
        return engines.decode(prompt, dict(params), expected)

    return engines.alone([partial(one, engines.prompts(_MIDDLE)) for _ in range(times)])


def stale_reference(engines: Engines, times: int) -> list[Outcome]:
    """Used a second time, after other prompts took the blocks."""

    def one(prompt: list[int]) -> list[Outcome]:
        expected, params = engines.expected(prompt), _params(engines, prompt)
        engines.decode(prompt, params, expected)
        _fill(engines)
        return engines.decode(prompt, dict(params), expected)

    return engines.alone([partial(one, engines.prompts(_MIDDLE)) for _ in range(times)])


def expired_lease(engines: Engines, times: int) -> list[Outcome]:
    """The decode leg comes when the lease is over, and other prompts took the blocks."""
    prompts = [engines.prompts(_MIDDLE) for _ in range(times)]
    expected = [engines.expected(prompt) for prompt in prompts]
    params = list[Params]()
    for number, prompt in enumerate(prompts):  # three leases leave room for other prompts
        params.append(_params(engines, prompt))
        if number % 3 == 2:
            time.sleep(LEASE_S + 2)
            _fill(engines)
    time.sleep(LEASE_S + 2)
    _fill(engines)
    legs = zip(prompts, params, expected, strict=True)
    return engines.alone([partial(engines.decode, *leg) for leg in legs])


def _fill(engines: Engines) -> None:
    for _ in range(4):
        engines.left.complete(engines.prompts(LONGEST - 100), max_tokens=1)


def ids_out_of_range(engines: Engines, times: int) -> list[Outcome]:
    """Blocks that no cache has."""

    def change(params: Params) -> Params:
        if "remote_block_ids" not in params:
            raise NotPlayed("its params name no blocks")
        count = len(params["remote_block_ids"][0]) if params["remote_block_ids"] else 1
        return {**params, "remote_block_ids": [[10**6 + number for number in range(count)]]}

    return _with_params(engines, times, change)


def anothers_reference(engines: Engines, times: int) -> list[Outcome]:
    """Of a prompt of the same length."""

    def one(prompt: list[int]) -> list[Outcome]:
        params = _params(engines, engines.prompts(_MIDDLE))
        return engines.decode(prompt, params, engines.expected(prompt))

    return engines.alone([partial(one, engines.prompts(_MIDDLE)) for _ in range(times)])


def swapped_references(engines: Engines, times: int) -> list[Outcome]:
    """Two requests at once, each with the other's."""

    def pair(first: list[int], second: list[int]) -> list[Outcome]:
        expected = [engines.expected(prompt) for prompt in (first, second)]
        params = [_params(engines, prompt) for prompt in (first, second)]
        return engines.together(
            [
                partial(engines.decode, first, params[1], expected[0]),
                partial(engines.decode, second, params[0], expected[1]),
            ]
        )

    lengths = [_MIDDLE * (1 + number % 2) for number in range(-(-times // 2))]
    return engines.alone(
        [partial(pair, engines.prompts(_MIDDLE), engines.prompts(length)) for length in lengths]
    )


def incomplete_params(engines: Engines, times: int) -> list[Outcome]:
    """Each key left out in turn."""
    return _each_key(engines, lambda key, value: {})


def mistyped_params(engines: Engines, times: int) -> list[Outcome]:
    """Each value of another type in turn."""
    return _each_key(engines, lambda key, value: {key: _other_type(value)})


def _other_type(value: Any) -> Any:
    if isinstance(value, bool):
        return "true"
    if isinstance(value, int):
        return str(value)
    return 5 if isinstance(value, str) else "text"


def _each_key(engines: Engines, change: Callable[[str, Any], Params]) -> list[Outcome]:
    keys = sorted(_params(engines, engines.prompts(_MIDDLE)))

    def one(prompt: list[int], key: str) -> list[Outcome]:
        expected, params = engines.expected(prompt), _params(engines, prompt)
        changed = change(key, params.pop(key, None))
        return engines.decode(prompt, {**params, **changed}, expected)

    return engines.alone([partial(one, engines.prompts(_MIDDLE), key) for key in keys])


def several_prompts(engines: Engines, times: int) -> list[Outcome]:
    """In one request."""

    def one() -> list[Outcome]:
        return engines.handoff([engines.prompts(_MIDDLE), engines.prompts(_SHORT)])

    return engines.alone([one] * -(-times // 2))


# ---- engines that end --------------------------------------------------------------------------


def producer_restarted(engines: Engines, times: int) -> list[Outcome]:
    """Between the two legs; the new one has computed other prompts."""
    legs = [_leg(engines) for _ in range(min(times, 3))]
    engines.restart("left")
    _fill(engines)
    return engines.alone([partial(engines.decode, *leg) for leg in legs])


def producer_killed_before(engines: Engines, times: int) -> list[Outcome]:
    """Between the two legs; nothing is in its place."""
    legs = [_leg(engines) for _ in range(min(times, 3))]
    engines.kill(engines.left)
    return engines.alone([partial(engines.decode, *leg) for leg in legs])


def producer_killed_during(engines: Engines, times: int) -> list[Outcome]:
    """While its blocks are fetched."""
    legs = [_leg(engines, tokens=_LONG) for _ in range(min(times, 3))]
    with _later(0.01, partial(engines.kill, engines.left)):
        return engines.together([partial(engines.decode, *leg) for leg in legs])


def producer_killed_after(engines: Engines, times: int) -> list[Outcome]:
    """While decode generates; and then another request comes."""
    legs = [_leg(engines, max_tokens=400) for _ in range(min(times, 3))]
    with _later(0.7, partial(engines.kill, engines.left)):
        found = engines.together([partial(engines.decode, *leg, max_tokens=400) for leg in legs])
    return [*found, *engines.without_handoff(engines.prompts(_MIDDLE))]


def consumer_killed(engines: Engines, times: int) -> list[Outcome]:
    """While it fetches. The prompts after it count: they need all of prefill's blocks."""
    legs = [_leg(engines, tokens=_LONG) for _ in range(3)]
    with _later(0.01, partial(engines.kill, engines.right)):
        engines.together([partial(engines.decode, *leg) for leg in legs])
    engines.restart("right")
    prompts = [engines.prompts(_LONG) for _ in range(times)]
    return engines.alone([partial(engines.handoff, prompt) for prompt in prompts])


def rolled_checkpoint(engines: Engines, times: int) -> list[Outcome]:
    """Prefill runs on another checkpoint of the same shape."""
    engines.restart("left", model=1)
    try:
        return handoffs(engines, min(times, 3))
    finally:
        engines.restart("left")


def _leg(engines: Engines, tokens: int = _MIDDLE, **more: Any) -> tuple[Any, Any, Any]:
    prompt = engines.prompts(tokens)
    return prompt, engines.prefill(prompt), engines.expected(prompt, **more)


@contextlib.contextmanager
def _later(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.start()
    yield
    timer.join()


# ---- pressure ----------------------------------------------------------------------------------


def full_cache(engines: Engines, times: int) -> list[Outcome]:
    """Prompts of which decode's cache holds three, from twelve clients."""
    prompts = [engines.prompts(_LONG) for _ in range(max(12, times))]
    return engines.together([partial(engines.handoff, prompt) for prompt in prompts])


def both_directions(engines: Engines, times: int) -> list[Outcome]:
    """Each engine is full of prompts that the other one is to decode."""
    prompts = [engines.prompts(_LONG) for _ in range(6)]
    expected = [engines.expected(prompt) for prompt in prompts]
    ways = [(engines.left, engines.right), (engines.right, engines.left)] * 3
    legs = list(zip(prompts, expected, ways, strict=True))
    params = _all_params(engines, [(prompt, way[0]) for prompt, _, way in legs])
    return engines.together(
        [
            partial(engines.decode, prompt, given, wanted, way[1])
            for (prompt, wanted, way), given in zip(legs, params, strict=True)
        ],
        engines.left,
        engines.right,
    )


def _all_params(engines: Engines, legs: list[tuple[list[int], VllmServer]]) -> list[Params | None]:
    """The prefill legs of these prompts, one after the other."""
    found = list[Params | None]()
    for prompt, server in legs:
        try:
            found.append(engines.prefill(prompt, server))
        except httpx.HTTPError:
            found.append(None)
    return found


def preempted_consumer(engines: Engines, times: int) -> list[Outcome]:
    """Answers that together are longer than decode's cache."""
    prompts = [engines.prompts(_MIDDLE) for _ in range(max(8, times))]
    return engines.together(
        [partial(engines.handoff, prompt, max_tokens=250) for prompt in prompts]
    )


def mixed_batch(engines: Engines, times: int) -> list[Outcome]:
    """Short and long, greedy and sampled, handed off and not, all at once."""
    more: list[Mapping[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"n": 2, "temperature": 0.9, "seed": 6},
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
        {"max_tokens": 60},
    ]
    lengths = (5, 31, 32, 33, _SHORT, _LONG)
    draw = random.Random(3)

    asked = [(engines.prompts(length), one) for length in lengths for one in more]
    tasks: list[Task] = [partial(engines.handoff, prompt, **one) for prompt, one in asked]
    tasks += [partial(engines.without_handoff, engines.prompts(_MIDDLE)) for _ in range(4)]
    draw.shuffle(tasks)
    found = list[Outcome]()
    for first in range(0, len(tasks), 10):
        found += engines.together(tasks[first : first + 10])
    return found


LEFT = frozenset({"left"})


@dataclass(frozen=True)
class Kind:
    """kills: the engines that it leaves dead itself. streamed: decode follows a lease while prefill
    computes the prompt in several steps; few connectors can."""

    play: Play
    kills: frozenset[str] = frozenset()
    streamed: bool = False


KINDS: Mapping[str, Kind] = {
    "handoffs, one by one": Kind(handoffs),
    "handoffs, sixteen at once": Kind(handoffs_at_once),
    "unknown reference": Kind(unknown_reference),
    "consumed reference": Kind(consumed_reference),
    "stale reference, blocks reused": Kind(stale_reference),
    "expired lease, blocks reused": Kind(expired_lease),
    "block ids out of range": Kind(ids_out_of_range),
    "another prompt's reference": Kind(anothers_reference),
    "swapped references": Kind(swapped_references),
    "incomplete params": Kind(incomplete_params),
    "mistyped params": Kind(mistyped_params),
    "several prompts in a request": Kind(several_prompts),
    "decode's cache full": Kind(full_cache),
    "a preempted consumer": Kind(preempted_consumer),
    "a mixed batch": Kind(mixed_batch),
    "both directions at once": Kind(both_directions),
    "producer restarted between legs": Kind(producer_restarted),
    "producer killed before the decode leg": Kind(producer_killed_before, LEFT),
    "producer killed during the decode leg": Kind(producer_killed_during, LEFT),
    "producer killed after the first token": Kind(producer_killed_after, LEFT),
    "consumer killed during its leg": Kind(consumer_killed),
    "prefill on another checkpoint": Kind(rolled_checkpoint),
    **{f"streamed: {name}": Kind(play, streamed=True) for name, play in streamed.PLAYS.items()},
}
