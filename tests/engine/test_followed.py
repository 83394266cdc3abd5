"""Decode follows a lease while prefill computes the prompt: the answer is a single engine's, in
float32, whatever happens to either engine amid the prompt.

The prefill engine is these tests' own. Its steps have fewer tokens than two blocks, and end within
blocks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from disagg.router.api.bodies import PARAMS
from disagg.testing.followed_legs import (
    INVITATION,
    Leg,
    decode_params,
    held_at,
    prefill_body,
    prefill_params,
    used,
    waiting,
)
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import BLOCK_BYTES, LEASE_S, SLOW, Fleet, lengths, running, transfer
from engine.followed import (
    check_followed,
    check_idle,
    failures,
    handed_off,
    invitation,
    loads,
)
from engine.test_exactness import WAYS

ENGINES = ("consumer", "single")
Prompt = Callable[[int], list[int]]
Legs = tuple[Leg, Leg]
N, STEP, BLOCKS = 128, 72, 160
LONG = 2400
EARLY, MIDDLE, LATE = (tokens / N / BLOCKS for tokens in (200, 1200, 1900))
"""Shares of the prefill engine's cache that so many tokens of a prompt have."""
HEARD_S = 1.0
"""Within this time vLLM's API server tells its scheduler that a client left."""
AT = pytest.mark.parametrize(
    "at",
    [pytest.param(EARLY, marks=SLOW), MIDDLE, pytest.param(LATE, marks=SLOW)],
    ids=["early", "middle", "late"],
)
STEPS = ("--max-num-batched-tokens", str(STEP), "--max-num-seqs", "16")
SIZE = ("--num-gpu-blocks-override", str(BLOCKS))


@dataclass
class Scene:
    """`invited`: by prefill, in its present life."""

    prefill: VllmServer
    decode: VllmServer
    single: VllmServer
    invited: dict[str, Any]

    def right(self, ids: list[int], **options: Any) -> list[list[int]]:
        return token_ids(self.single.complete(ids, **options))

    def classic(self, decode: VllmServer, ids: list[int], params: Any) -> list[list[int]]:
        """A handoff with the answer of a prefill."""
        return token_ids(decode.complete(ids, kv_transfer_params=params))

    def end(self, ids: list[int], first: Leg) -> None:
        """Decode knows the prompt; so a handoff that it does not need ends the lease."""
        assert self.classic(self.decode, ids, first.answer()[PARAMS]) == self.right(ids)

    def held(self, ids: list[int], at: float) -> contextlib.AbstractContextManager[Legs]:
        """Both legs; within the context prefill has computed this share of its cache."""
        return held_at(self.prefill, at, partial(self.legs, ids))

    def legs(self, ids: list[int]) -> Legs:
        """Prefill's and decode's, sent at once."""
        stream = secrets.token_hex(16)
        follows = completion(ids, kv_transfer_params=decode_params(self.invited, stream))
        return Leg(self.prefill, prefill_body(ids, prefill_params(stream))), Leg(
            self.decode, follows
        )


@pytest.fixture(scope="module")
def start(
    fleet: Fleet,
    model: Path,
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., VllmServer]:
    """An engine that shares its secret with the fleet."""
    logs = tmp_path_factory.mktemp("followed")
    env = {"TMPDIR": fleet.producer.env["TMPDIR"], "VLLM_SERVER_DEV_MODE": "1"}

    def make(name: str, role: str, *args: str) -> VllmServer:
        config = transfer(role, lease_s=LEASE_S)
        log, holds = logs / f"{name}.log", role == "kv_producer"
        return vllm_server(name, model, log, config, (*args, *SIZE), env=env, can_hold=holds)

    return make


@pytest.fixture(scope="module")
def prefill(fleet: Fleet, start: Callable[..., VllmServer]) -> Iterator[VllmServer]:
    fleet.wake(*ENGINES)
    server = start("steps", "kv_producer", *STEPS)
    with running([server]):
        yield server


@pytest.fixture
def scene(fleet: Fleet, prefill: VllmServer) -> Iterator[Scene]:
    """Before and after each test, nothing is held."""
    if not is_alive(prefill):
        prefill.launch()
        prefill.wait_ready()
    params, ids = prefill.prefill([300, 301, 302]), [300, 301, 302]
    scene = Scene(prefill, fleet.consumer, fleet.single, params[INVITATION])
    scene.classic(scene.decode, ids, params)  # which ends the lease
    check_idle(prefill, fleet.consumer)
    yield scene
    check_idle(*filter(is_alive, (prefill, fleet.consumer)))


def is_alive(server: VllmServer) -> bool:
    return server.process is not None and server.process.poll() is None


# ---- answers -----------------------------------------------------------------------------------


@lengths(2, STEP + 1, 128, 129, 2000, long=[127, 193])
@pytest.mark.parametrize("way", WAYS)
def test_any_length(
    fleet: Fleet, prefill: VllmServer, prompt: Prompt, way: str, length: int
) -> None:
    _, consumer, transport = WAYS[way]
    fleet.wake(consumer, "single")
    decode: VllmServer = getattr(fleet, consumer)
    moved = partial(decode.metric, "disagg_handoff_bytes_total", transport=transport)
    asked: list[list[int]] = []

    def ask() -> list[int]:
        asked.append(prompt(length))
        return asked[-1]

    def right(ids: list[int]) -> list[list[int]]:
        return token_ids(fleet.single.complete(ids))

    invited, before = invitation(prefill, decode), moved()
    check_followed(prefill, decode, ask, right, invited=invited)
    assert moved() - before == len(asked) * -(-length // N) * BLOCK_BYTES


@pytest.mark.parametrize(
    "options",
    [{"logprobs": 3}, {"temperature": 0.8, "seed": 11}, {"n": 2, "temperature": 0.8, "seed": 11}],
    ids=lambda options: "-".join(options),
)
def test_options(scene: Scene, prompt: Prompt, options: dict[str, Any]) -> None:
    ids, before = prompt(1000), (loads(scene.decode), failures(scene.decode))
    answer = handed_off(scene.prefill, scene.decode, ids, scene.invited, **options)
    reference = scene.single.complete(ids, **options)
    assert token_ids(answer) == token_ids(reference)
    if "logprobs" in options:
        ours, theirs = (a["choices"][0]["logprobs"]["token_logprobs"] for a in (answer, reference))
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert (loads(scene.decode), failures(scene.decode)) == (before[0] + 1, before[1])


def test_one_token_is_computed(scene: Scene, prompt: Prompt) -> None:
    ids, before = prompt(1), failures(scene.decode)
    answer = handed_off(scene.prefill, scene.decode, ids, scene.invited)
    assert token_ids(answer) == scene.right(ids)
    assert failures(scene.decode) == before


def test_what_either_has_cached_is_used(scene: Scene, prompt: Prompt) -> None:
    ids, before = prompt(700), loads(scene.decode)
    for more in (ids, ids, [*ids, *prompt(600)]):
        answer = handed_off(scene.prefill, scene.decode, more, scene.invited)
        assert token_ids(answer) == scene.right(more)
    known = prompt(700)
    scene.prefill.complete(known)
    longer = [*known, *prompt(600)]
    answer = handed_off(scene.prefill, scene.decode, longer, scene.invited)
    assert token_ids(answer) == scene.right(longer)
    assert loads(scene.decode) >= before + 3


def test_many_at_once(scene: Scene, prompt: Prompt) -> None:
    """Their steps are shared, and the cache has room for some of them only."""
    prompts = [prompt(200 + 117 * number) for number in range(10)]
    before = loads(scene.decode), failures(scene.decode)
    with ThreadPoolExecutor(10) as pool:
        ask = partial(handed_off, scene.prefill, scene.decode, invited=scene.invited)
        answers = [token_ids(answer) for answer in pool.map(ask, prompts)]
    assert answers == [scene.right(ids) for ids in prompts]
    assert loads(scene.decode) == before[0] + 10
    assert failures(scene.decode) == before[1]


# ---- faults ------------------------------------------------------------------------------------


@AT
def test_prefills_client_leaves(scene: Scene, prompt: Prompt, at: float) -> None:
    ids, before = prompt(LONG), failures(scene.decode, "lease_gone")
    with scene.held(ids, at) as (first, second):
        assert not first.is_answered
        first.leave()
        time.sleep(HEARD_S)
    assert token_ids(second.answer()) == scene.right(ids)
    assert failures(scene.decode, "lease_gone") == before + 1


@AT
def test_decodes_client_leaves(scene: Scene, prompt: Prompt, at: float) -> None:
    """The lease ends with the prompt, and nobody else can fetch it."""
    ids, outcome = prompt(LONG), {"outcome": "aborted"}
    before = scene.prefill.metric("disagg_leases_total", **outcome)
    with scene.held(ids, at) as (first, second):
        assert eventually(lambda: used(scene.decode) > 0)
        second.leave()
        assert eventually(lambda: used(scene.decode) == 0)
    params = first.answer()[PARAMS]
    aborted = partial(scene.prefill.metric, "disagg_leases_total", **outcome)
    assert eventually(lambda: aborted() == before + 1)
    assert scene.classic(scene.decode, ids, params) == scene.right(ids)


def test_decodes_client_leaves_before_the_prompt_begins(scene: Scene, prompt: Prompt) -> None:
    ids, stream = prompt(1000), secrets.token_hex(16)
    follows = completion(ids, kv_transfer_params=decode_params(scene.invited, stream))
    second = Leg(scene.decode, follows)
    assert eventually(lambda: waiting(scene.decode) == 1)
    second.leave()
    assert eventually(lambda: waiting(scene.decode) == 0)
    first = Leg(scene.prefill, prefill_body(ids, prefill_params(stream)))
    params = first.answer()[PARAMS]
    assert scene.classic(scene.decode, ids, params) == scene.right(ids)


def test_prefill_pauses(scene: Scene, prompt: Prompt) -> None:
    """For as long as decode answers somebody else."""
    ids, other = prompt(LONG), prompt(300)
    with scene.held(ids, MIDDLE) as (first, second):
        scene.prefill.pause()
        try:
            assert token_ids(scene.decode.complete(other)) == scene.right(other)
        finally:
            scene.prefill.resume()
    assert token_ids(second.answer()) == scene.right(ids)
    scene.end(ids, first)


@pytest.mark.slow
def test_prefill_pauses_for_long(scene: Scene, prompt: Prompt) -> None:
    """Decode waits for a deadline, and no longer."""
    ids, before = prompt(LONG), failures(scene.decode)
    with scene.held(ids, MIDDLE) as (first, second):
        scene.prefill.pause()
        try:
            answer = token_ids(second.answer())
        finally:
            scene.prefill.resume()
    assert answer == scene.right(ids)
    assert failures(scene.decode) == before + 1
    scene.end(ids, first)


@pytest.mark.parametrize(
    ("anew", "at"),
    [(False, MIDDLE), (True, LATE), pytest.param(True, EARLY, marks=SLOW)],
    ids=["goes-on-middle", "anew-late", "anew-early"],
)
def test_prefills_cache_is_reset(scene: Scene, prompt: Prompt, anew: bool, at: float) -> None:
    ids = prompt(LONG)
    asked = f"/reset_prefix_cache?reset_external=true&reset_running_requests={anew}"
    with scene.held(ids, at) as (first, second):
        reset = Leg(scene.prefill, {}, asked)
    assert reset.answer()["success"] is anew
    assert token_ids(second.answer()) == scene.right(ids)
    scene.end(ids, first)


def test_prefill_begins_anew(scene: Scene, prompt: Prompt) -> None:
    """As when it preempts a prompt: decode goes on following."""
    ids, before = prompt(LONG), (loads(scene.decode), failures(scene.decode))
    with scene.held(ids, MIDDLE) as (first, second):
        reset = Leg(scene.prefill, {}, "/reset_prefix_cache?reset_running_requests=true")
    assert reset.answer()["success"] is True
    assert token_ids(second.answer()) == scene.right(ids)
    assert first.answer()[PARAMS]
    assert (loads(scene.decode), failures(scene.decode)) == (before[0] + 1, before[1])


def test_decode_is_asked_first(scene: Scene, prompt: Prompt) -> None:
    """It keeps no blocks while it waits, and answers others."""
    ids, other, stream = prompt(1000), prompt(300), secrets.token_hex(16)
    before = loads(scene.decode), failures(scene.decode)
    follows = completion(ids, kv_transfer_params=decode_params(scene.invited, stream))
    second = Leg(scene.decode, follows)
    assert eventually(lambda: waiting(scene.decode) == 1)
    assert token_ids(scene.decode.complete(other)) == scene.right(other)
    assert eventually(lambda: used(scene.decode) == 0)
    assert not second.is_answered
    first = Leg(scene.prefill, prefill_body(ids, prefill_params(stream)))
    assert token_ids(second.answer()) == scene.right(ids)
    assert first.answer()[PARAMS]
    assert (loads(scene.decode), failures(scene.decode)) == (before[0] + 1, before[1])


def test_the_stream_of_another_prompt(scene: Scene, prompt: Prompt) -> None:
    ids, stream = prompt(LONG), secrets.token_hex(16)
    other = [*ids[:1200], *prompt(1200)]
    before = failures(scene.decode, "prompt_mismatch")
    first = Leg(scene.prefill, prefill_body(ids, prefill_params(stream)))
    params = decode_params(scene.invited, stream)
    answer = scene.decode.complete(other, kv_transfer_params=params)
    assert token_ids(answer) == scene.right(other)
    assert failures(scene.decode, "prompt_mismatch") == before + 1
    loaded = loads(scene.decode)
    scene.end(ids, first)
    assert loads(scene.decode) == loaded + 1


@pytest.mark.parametrize(
    "forge",
    [lambda ticket: ticket[::-1], lambda ticket: f"AAAA{ticket[4:]}", lambda ticket: ticket[:-8]],
    ids=["reversed", "changed", "cut"],
)
def test_a_forged_invitation(scene: Scene, prompt: Prompt, forge: Callable[[str], str]) -> None:
    ids, stream, before = prompt(700), secrets.token_hex(16), failures(scene.decode)
    first = Leg(scene.prefill, prefill_body(ids, prefill_params(stream)))
    forged = {**scene.invited, "ticket": forge(scene.invited["ticket"])}
    answer = scene.decode.complete(ids, kv_transfer_params=decode_params(forged, stream))
    assert token_ids(answer) == scene.right(ids)
    assert failures(scene.decode) == before + 1
    # The lease was not hurt.
    again = prompt(300)
    assert scene.classic(scene.decode, ids, first.answer()[PARAMS]) == scene.right(ids)
    assert token_ids(handed_off(scene.prefill, scene.decode, again, scene.invited)) == scene.right(
        again
    )


def test_decode_is_killed(scene: Scene, start: Callable[..., VllmServer], prompt: Prompt) -> None:
    """Another one fetches the whole lease."""
    ids, before = prompt(LONG), loads(scene.decode)
    mortal = start("mortal", "kv_consumer")
    with running([mortal]):
        mortals = Scene(scene.prefill, mortal, scene.single, scene.invited)
        with mortals.held(ids, MIDDLE) as (first, second):
            assert eventually(lambda: used(mortal) > 0)
            assert mortal.process is not None
            os.killpg(mortal.process.pid, signal.SIGKILL)
        second.leave()
        assert scene.classic(scene.decode, ids, first.answer()[PARAMS]) == scene.right(ids)
    assert loads(scene.decode) == before + 1


@pytest.mark.parametrize(
    ("who", "at"),
    [pytest.param("all", EARLY, marks=SLOW), ("worker", LATE)],
    ids=["all-early", "worker-late"],
)
def test_prefill_is_killed(scene: Scene, prompt: Prompt, who: str, at: float) -> None:
    """The next test that needs it starts it again."""
    ids, before = prompt(LONG), failures(scene.decode, "peer_lost")
    assert scene.prefill.process is not None
    with scene.held(ids, at) as (first, second):
        assert not first.is_answered
        if who == "worker":
            scene.prefill.worker().kill()
        else:
            os.killpg(scene.prefill.process.pid, signal.SIGKILL)
    assert token_ids(second.answer()) == scene.right(ids)
    assert failures(scene.decode, "peer_lost") == before + 1
    first.leave()
    scene.prefill.stop()
    # What it was is not waited for.
    ids, stream = prompt(700), secrets.token_hex(16)
    answer = scene.decode.complete(ids, kv_transfer_params=decode_params(scene.invited, stream))
    assert token_ids(answer) == scene.right(ids)
