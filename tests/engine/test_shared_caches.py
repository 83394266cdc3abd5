"""Engines fetch what other engines' caches hold, of whichever role: the answers stay a single
engine's, in float32, under evictions, resets and deaths.

All engines take either role, so that each test chooses who prefills and who decodes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from disagg.testing.followed_legs import is_idle
from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.vllm_compat import versions
from engine.conftest import LEASE_S, routed, running, transfer
from engine.test_cache_aware import BLOCK, Engine, ids, metric, settled, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(versions.matches("<0.31"), reason="this vLLM does not tell its ports"),
]
PAIRING = {"prefill": "cache_aware", "decode": "cache_aware", "share_caches": "always"}
LONG = 47 * BLOCK
ANSWER = 100
"""Tokens of an answer: at least two blocks more than prefill holds."""


@dataclass(frozen=True)
class Scene:
    engines: list[Engine]
    single: VllmServer

    def routed(self, prefills: Sequence[Engine], decodes: Sequence[Engine], **section: Any) -> Any:
        """A router that hears these engines, and lets them share their caches."""
        addresses = {
            one.url: {"endpoint": one.events, "replay_endpoint": one.replay}
            for one in (*prefills, *decodes)
        }
        pairing = {**PAIRING, **section}
        return routed(
            prefills, decodes, engines={"kv_events": addresses}, pairing=pairing, access_log=False
        )

    def right(self, prompt: list[int], **options: Any) -> list[int]:
        (answer,) = token_ids(self.single.complete(prompt, **options))
        return answer


@pytest.fixture(scope="module")
def scene(
    model: Path, vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    logs = tmp_path_factory.mktemp("logs")
    both = transfer("kv_both", lease_s=LEASE_S)
    engines = [
        Engine(vllm_server, model, logs / f"e{n}.log", f"e{n}", transfer=both) for n in range(3)
    ]
    for one in engines:
        one.server.env["TMPDIR"] = str(logs)  # one secret
    single = vllm_server("single", model, logs / "single.log", None)
    with running([*(one.server for one in engines), single]):
        for one in engines:
            one.find()
        yield Scene(engines, single)


@pytest.fixture
def fresh(scene: Scene) -> Scene:
    """Nothing is in any cache."""
    for one in scene.engines:
        one.server.post("/reset_prefix_cache", {}).raise_for_status()
    return scene


def ask(url: str, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", **completion(prompt, **options)}
    answer = client().post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def answered(url: str, prompt: list[int], **options: Any) -> list[int]:
    (tokens,) = token_ids(ask(url, prompt, **options))
    return tokens


def leased(url: str) -> float:
    return metric(url, "disagg_router_sources_total", outcome="leased")


def computed(engine: Engine) -> float:
    """Prompt tokens that it has run through its model."""
    return engine.server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


def test_prefill_fetches_what_decode_has_written(fresh: Scene) -> None:
    """The next turn's prompt has decode's answer: prefill computes only what is new."""
    generator = random.Random(1)
    prefill, decode, _ = fresh.engines
    with fresh.routed([prefill], [decode]) as url:
        prompt = ids(generator, 300)
        for turn in range(4):
            before = computed(prefill) + computed(decode)
            answer = answered(url, prompt, max_tokens=150)
            assert answer == fresh.right(prompt, max_tokens=150)
            if turn:
                new = 100 + 2 * BLOCK  # the ends of two blocks are computed again
                assert computed(prefill) + computed(decode) - before <= new
            prompt = [*prompt, *answer, *ids(generator, 100)]
            settled(url)
        assert leased(url) == 3


def test_many_prompts_with_one_prefix(fresh: Scene) -> None:
    """More than the engine that holds it can take at once: another prefill engine fetches it."""
    generator = random.Random(2)
    first, second, decode = fresh.engines
    prefix = ids(generator, LONG)
    with fresh.routed([first, second], [decode]) as url:
        assert answered(url, prefix) == fresh.right(prefix)
        settled(url)
        prompts = [[*prefix, *ids(generator, 100)] for _ in range(8)]
        before = [computed(first), computed(second)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: answered(url, prompt), prompts))
        assert answers == [fresh.right(prompt) for prompt in prompts]
        assert leased(url) > 0
        after = [computed(first), computed(second)]
        assert all(now > then for now, then in zip(after, before, strict=True))
        assert sum(after) - sum(before) < LONG, "nobody computes the prefix again"


def test_decode_fetches_from_decode(fresh: Scene) -> None:
    """Where little is left to compute, no prefill leg is sent."""
    generator = random.Random(3)
    prefill, first, second = fresh.engines
    prefix = ids(generator, LONG)
    first.ask(prefix)  # past the router, which hears of it all the same
    with fresh.routed([prefill], [second, first]) as url:
        settled(url)
        prompts = [[*prefix, *ids(generator, 40)] for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda prompt: answered(url, prompt), prompts))
        assert answers == [fresh.right(prompt) for prompt in prompts]
        elsewhere = metric(url, "disagg_router_local_total", reason="prefix_elsewhere")
        assert elsewhere == leased(url) > 0


# ---- many, while something goes wrong ----------------------------------------------------------


class Load:
    """Conversations that several clients go on with at once. Every answer is checked later."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.failed = url, 0
        self.answers: list[tuple[list[int], list[int]]] = []
        self._random, self._lock = random.Random(seed), threading.Lock()
        systems = [ids(self._random, size) for size in (200, 420)]
        self._prompts = [[*self._random.choice(systems), *ids(self._random, 60)] for _ in range(8)]

    def run(self, count: int, disturb: Callable[[int], None], clients: int = 3) -> None:
        """So many requests; `disturb` is called with the number of each, before it is sent."""
        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(self._ask, number, disturb) for number in range(count)]:
                done.result()

    def _ask(self, number: int, disturb: Callable[[int], None]) -> None:
        with self._lock:
            disturb(number)
            prompt = self._prompts.pop(self._random.randrange(len(self._prompts)))
        body = {"model": "tiny", **completion(prompt, max_tokens=ANSWER)}
        answer = client().post(f"{self.url}/v1/completions", json=body, timeout=120)
        with self._lock:
            if answer.status_code != 200:
                assert "error" in answer.json(), answer.text
                self.failed += 1
                self._prompts.append(prompt)
                return
            (tokens,) = token_ids(answer.json())
            self.answers.append((prompt, tokens))
            turn = [*prompt, *tokens, *ids(self._random, self._random.randrange(20, 100))]
            self._prompts.append(turn if len(turn) < 900 else prompt[:260])


def check_idle(engines: Sequence[Engine]) -> None:
    """Nothing is held, once leases that lost their consumer have run out."""
    for engine in engines:
        until(partial(is_idle, engine.server), 3 * LEASE_S)


SLOW = [pytest.mark.slow, pytest.mark.soak]
MANY = pytest.mark.parametrize("count", [12, pytest.param(500, marks=SLOW)])


@MANY
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "roles",
    [pytest.param((1, 2), id="two-decode"), pytest.param((2, 1), marks=SLOW, id="two-prefill")],
)
def test_under_eviction_and_resets(fresh: Scene, count: int, roles: tuple[int, int]) -> None:
    """The caches are too small for all conversations, and are reset now and then."""
    split, engines = roles[0], fresh.engines
    choose, every = random.Random(count), min(20, count // 2)

    def reset(number: int) -> None:
        if number % every == every - 1:
            path = "/reset_prefix_cache?reset_external=true&reset_running_requests=true"
            server = choose.choice(engines).server
            # vLLM refuses while a request of the engine waits for blocks.
            until(lambda: server.post(path, {}).status_code == 200, 30)

    with fresh.routed(engines[:split], engines[split:], local_prefill_tokens=16) as url:
        load = Load(url, count)
        load.run(count, reset)
        assert leased(url) > count / 20
    assert load.failed == 0
    for prompt, tokens in load.answers:
        assert tokens == fresh.right(prompt, max_tokens=ANSWER)
    check_idle(engines)


@MANY
@pytest.mark.timeout(1800)
def test_an_engine_dies(fresh: Scene, count: int) -> None:
    """The one that others fetch from. Last, as it stays away."""
    prefill, stays, dies = fresh.engines

    def kill(number: int) -> None:
        if number == count // 2 and dies.server.process is not None:
            os.killpg(dies.server.process.pid, signal.SIGKILL)

    with fresh.routed([prefill], [stays, dies], local_prefill_tokens=16) as url:
        load = Load(url, count)
        load.run(count, kill)
        assert leased(url) > count / 20
    assert load.failed <= 3, "what was at the engine, and no more"
    assert len(load.answers) + load.failed == count
    for prompt, tokens in load.answers:
        assert tokens == fresh.right(prompt, max_tokens=ANSWER)
    check_idle([prefill, stays])
