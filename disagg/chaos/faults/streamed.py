"""Faults of requests whose legs are sent at once: decode follows the lease while it grows.

Prefill computes each prompt in several steps. Where a fault has to come amid the prompt, prefill's
scheduler is held meanwhile, so that it does come there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Any

from disagg.chaos.faults.connectors import Params
from disagg.chaos.faults.engines import (
    ANSWER_S,
    BLOCK_SIZE,
    NUM_BLOCKS,
    Engines,
    NotPlayed,
    Outcome,
)
from disagg.router.api.bodies import PARAMS
from disagg.testing.followed_legs import (
    INVITATION,
    Leg,
    held_at,
    is_idle,
    prefill_body,
    used,
    waiting,
)
from disagg.testing.vllm_server import VllmServer, completion
from disagg.testing.waiting import eventually

_TOKENS, _SHORT = 1400, 100
_AMID = (200, 600, 900)
"""So many tokens of a prompt are computed when its fault comes: early, in the middle, late."""
_SOON_S, _LONG_BEFORE_S = 3.0, 3.0


class Request:
    """One request, and the single engine's answer to it. given: decode's params."""

    def __init__(self, engines: Engines) -> None:
        """Nothing is sent yet; both engines come to be idle."""
        follow = engines.connector.follow
        assert follow is not None
        self._engines, self.prompt = engines, engines.prompts(_TOKENS)
        self.expected = engines.expected(self.prompt)
        self._asked, self.given = follow(_answered(engines, engines.left, engines.right))
        for server in (engines.left, engines.right):
            eventually(partial(is_idle, server), ANSWER_S)

    def begin(self) -> None:
        """Send prefill's leg."""
        body = prefill_body(self.prompt, self._asked)
        self.first = Leg(self._engines.left, body, timeout_s=ANSWER_S)

    def follow(self) -> None:
        """Send decode's leg."""
        pool = ThreadPoolExecutor(1)
        decode = self._engines.decode
        self._second: Future[list[Outcome]] = pool.submit(
            decode, self.prompt, self.given, self.expected
        )
        pool.shutdown(wait=False)

    def follow_for_a_while(self) -> None:
        """Send decode's leg, as a client that will leave."""
        self.second = Leg(self._engines.right, completion(self.prompt) | {PARAMS: self.given})

    def outcome(self) -> list[Outcome]:
        """Of the decode leg that `follow` sent."""
        return self._second.result()

    def as_a_whole(self) -> list[Outcome]:
        """Of another decode leg, with the params of prefill's answer."""
        try:
            params = self.first.answer().get(PARAMS)
        except RuntimeError:
            return [Outcome.REFUSED]
        return self._engines.decode(self.prompt, params, self.expected)


def _answered(engines: Engines, prefill: VllmServer, decode: VllmServer) -> Params:
    """What an earlier prefill leg answered. No lease of it stays."""
    prompt = engines.prompts(_SHORT)
    params = engines.prefill(prompt, prefill)
    if params is None:
        raise NotPlayed("prefill answered without params")
    engines.decode(prompt, params, engines.expected(prompt), decode)
    return params


@contextlib.contextmanager
def _amid(
    engines: Engines, tokens: int, send: Callable[[Request], None] = Request.follow
) -> Iterator[Request]:
    """A request, after decode began to follow it. Within the context prefill stands still, and has
    computed so many tokens of the prompt, or a little more. send: sends decode's leg."""
    request = Request(engines)

    def both() -> None:
        request.begin()
        send(request)

    with held_at(engines.left, tokens / BLOCK_SIZE / NUM_BLOCKS, both):
        if not eventually(lambda: used(engines.right) > 0, ANSWER_S):
            raise NotPlayed("decode did not begin to follow the prompt")
        yield request


def _each(engines: Engines, times: int, one: Callable[[int], list[Outcome]]) -> list[Outcome]:
    """Play one of each place in the prompt, in turn."""
    return engines.alone([partial(one, tokens) for tokens in islice(cycle(_AMID), times)])


# ---- kinds -------------------------------------------------------------------------------------


def handoffs(engines: Engines, times: int) -> list[Outcome]:
    """Nothing goes wrong."""

    def one() -> list[Outcome]:
        request = Request(engines)
        request.begin()
        request.follow()
        return request.outcome()

    return engines.alone([one] * times)


def producer_killed(engines: Engines, times: int) -> list[Outcome]:
    """And then a request comes that is to follow the dead one."""

    def one(tokens: int) -> list[Outcome]:
        late = Request(engines)
        with _amid(engines, tokens) as request:
            engines.kill(engines.left)
        found = request.outcome()
        late.follow()
        found += late.outcome()
        engines.restart("left")
        return found

    return _each(engines, min(times, 3), one)


def consumer_killed(engines: Engines, times: int) -> list[Outcome]:
    """The one in its place fetches the whole lease."""

    def one(tokens: int) -> list[Outcome]:
        with _amid(engines, tokens) as request:
            engines.restart("right")
        return request.as_a_whole()

    return _each(engines, min(times, 3), one)


def prefills_client_leaves(engines: Engines, times: int) -> list[Outcome]:
    """Decode's client stays."""

    def one(tokens: int) -> list[Outcome]:
        with _amid(engines, tokens) as request:
            request.first.leave()
        return request.outcome()

    return _each(engines, times, one)


def decodes_client_leaves(engines: Engines, times: int) -> list[Outcome]:
    """Decode gives its blocks back at once. Prefill's client stays, and tries another time."""

    def one(tokens: int) -> list[Outcome]:
        with _amid(engines, tokens, Request.follow_for_a_while) as request:
            request.second.leave()
            found = _kept(engines.right)
        return [*found, *request.as_a_whole()]

    return _each(engines, times, one)


def cache_reset(engines: Engines, times: int) -> list[Outcome]:
    """With the requests that run: prefill begins anew with the prompt, as after a preemption."""

    def one(tokens: int) -> list[Outcome]:
        with _amid(engines, tokens) as request:
            path = "/reset_prefix_cache?reset_running_requests=true"
            reset = Leg(engines.left, {}, path, ANSWER_S)
        if not reset.answer()["success"]:
            raise NotPlayed("prefill did not reset its cache")
        return request.outcome()

    return _each(engines, times, one)


def forged_invitation(engines: Engines, times: int) -> list[Outcome]:
    """Reversed, changed, cut, or of another engine; and then the whole lease, which is not hurt."""

    def one(change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Outcome]:
        request = Request(engines)
        request.given = {**request.given, INVITATION: change(request.given[INVITATION])}
        request.begin()
        request.follow()
        return [*request.outcome(), *request.as_a_whole()]

    def of_another(invited: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = _answered(engines, engines.right, engines.left)[INVITATION]
        return found

    changes = (
        _forged(lambda ticket: ticket[::-1]),
        of_another,
        _forged(lambda ticket: f"AAAA{ticket[4:]}"),
        _forged(lambda ticket: ticket[:-8]),
    )
    return engines.alone([partial(one, change) for change in islice(cycle(changes), times)])


def _forged(forge: Callable[[str], str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda invited: {**invited, "ticket": forge(invited["ticket"])}


def anothers_stream(engines: Engines, times: int) -> list[Outcome]:
    """Of a prompt that begins alike; and then the whole lease, which is not hurt."""

    def one() -> list[Outcome]:
        request, half = Request(engines), _TOKENS // 2
        other = [*request.prompt[:half], *engines.prompts(half)]
        expected = engines.expected(other)
        request.begin()
        found = engines.decode(other, request.given, expected)
        return [*found, *request.as_a_whole()]

    return engines.alone([one] * times)


def decode_asked_long_before(engines: Engines, times: int) -> list[Outcome]:
    """It keeps nothing for the prompt until prefill begins, and answers others."""

    def one() -> list[Outcome]:
        request = Request(engines)
        request.follow()
        eventually(lambda: waiting(engines.right) > 0, _SOON_S)
        found = engines.without_handoff(engines.prompts(_SHORT))
        found += _kept(engines.right)
        time.sleep(_LONG_BEFORE_S)
        request.begin()
        return [*found, *request.outcome()]

    return engines.alone([one] * times)


def _kept(server: VllmServer) -> list[Outcome]:
    """Whether it keeps blocks; empty if not."""
    return [] if eventually(lambda: not used(server), _SOON_S) else [Outcome.KEPT]


PLAYS: Mapping[str, Callable[[Engines, int], list[Outcome]]] = {
    "handoffs, one by one": handoffs,
    "producer killed amid the prompt": producer_killed,
    "consumer killed amid the prompt": consumer_killed,
    "prefill's client leaves amid the prompt": prefills_client_leaves,
    "decode's client leaves amid the prompt": decodes_client_leaves,
    "prefill's cache reset amid the prompt": cache_reset,
    "forged invitation": forged_invitation,
    "another prompt's stream": anothers_stream,
    "decode asked long before prefill": decode_asked_long_before,
}
