"""Both legs of a request at once: decode follows the lease while prefill computes the prompt."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from disagg.connector.handoff.kv_transfer_params import INVITATION, STREAM
from disagg.router.api.bodies import PARAMS, REMOTE_DECODE
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from engine.processes import core_of
from engine.waiting import eventually

PATH, TRIES = "/v1/completions", 5
STEPS_THAT_SHOW = 3
"""In so many steps, decode fetches some blocks before the last one, on a machine that is not so
busy that it comes too late."""
_SLICE_S, _HOLD_S = 0.01, 60.0
_IDLE_S = 30.0


def invitation(prefill: VllmServer, decode: VllmServer | None = None) -> dict[str, Any]:
    """What an earlier answer of the prefill engine has. decode: fetches its blocks, so that no
    lease stays."""
    ids = [300, 301, 302]
    params = prefill.prefill(ids)
    if decode is not None:
        decode.complete(ids, kv_transfer_params=params)
    found: dict[str, Any] = params[INVITATION]
    return found


def prefill_params(stream: str) -> dict[str, Any]:
    """What makes a prefill's lease grow under this name."""
    return {**REMOTE_DECODE, STREAM: stream}


def decode_params(invited: dict[str, Any], stream: str) -> dict[str, Any]:
    """What makes decode follow that lease."""
    return {"do_remote_prefill": True, INVITATION: invited, STREAM: stream}


def prefill_body(prompt: Any, stream: str, **options: Any) -> dict[str, Any]:
    """The prefill leg of a completion."""
    begins = {**completion(prompt, **options), "max_tokens": 1, "min_tokens": 0, "n": 1}
    return {**begins, PARAMS: prefill_params(stream)}


def handed_off(
    prefill: VllmServer,
    decode: VllmServer,
    prompt: Any,
    invited: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Decode's answer to a request whose legs were sent at once."""
    stream, invited = secrets.token_hex(16), invited or invitation(prefill, decode)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(prefill.post, PATH, prefill_body(prompt, stream, **options))
        params = decode_params(invited, stream)
        answer = decode.complete(prompt, kv_transfer_params=params, **options)
        assert sent.result().status_code == 200
    return answer


# ---- what decode counts ------------------------------------------------------------------------


def loads(decode: VllmServer) -> float:
    """How many handoffs brought blocks."""
    return _total(decode, "disagg_handoffs", "outcome=loaded")


def failures(decode: VllmServer, reason: str = "") -> float:
    """How many prompts it computed itself, as their blocks did not come; for this reason or any."""
    return _total(decode, "disagg_kv_load_failures", f"reason={reason}")


def hidden(decode: VllmServer) -> float:
    """Bytes that came while their prompts were being computed."""
    return _total(decode, "disagg_handoff_hidden_bytes")


def _total(decode: VllmServer, family: str, label: str = "") -> float:
    """Over all labels, or those with this one."""
    samples = decode.metrics(family).items()
    return sum(value for name, value in samples if "_total{" in name and label in name)


def check_followed(
    prefill: VllmServer,
    decode: VllmServer,
    prompt: Callable[[], list[int]],
    right: Callable[[list[int]], list[list[int]]],
    *,
    invited: dict[str, Any] | None = None,
    may_fail: bool = False,
    **options: Any,
) -> None:
    """That decode answers `right`, with blocks of prefill's; if the prompt has several steps, with
    some that came during them. A prompt whose blocks came too late for that is followed by another.

    may_fail: on a busy machine, engines of several ranks may miss the deadlines of messages.
    """
    invited, seen = invited or invitation(prefill, decode), []
    for _ in range(TRIES):
        ids = prompt()
        before = loads(decode), failures(decode), hidden(decode)
        gone = failures(decode, "lease_gone")
        answer = token_ids(handed_off(prefill, decode, ids, invited, **options))
        assert answer == right(ids)
        loaded, failed = loads(decode) - before[0], failures(decode) - before[1]
        assert may_fail or (loaded, failed) == (1, 0)
        assert failures(decode, "lease_gone") == gone
        many_steps = len(ids) > STEPS_THAT_SHOW * invited["step_tokens"]
        if loaded and (hidden(decode) > before[2] or not many_steps):
            return
        seen.append((loaded, failed))
    raise AssertionError(f"nothing came while prompts were computed; loaded and failed: {seen}")


# ---- faults amid a prompt ----------------------------------------------------------------------


class Leg:
    """A request that was sent, and that its client may leave. Reading it has a deadline."""

    def __init__(self, server: VllmServer, body: dict[str, Any], path: str = PATH) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        content = json.dumps({"model": "tiny", **body})
        self._connection.request("POST", path, content, {"content-type": "application/json"})

    @property
    def is_answered(self) -> bool:
        """Whether there is some of an answer, or its end."""
        return bool(select.select([self._connection.sock], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        """Wait for it."""
        response = self._connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        self.leave()
        answer: dict[str, Any] = json.loads(content)
        return answer

    def leave(self) -> None:
        """Disconnect."""
        self._connection.close()


def used(server: VllmServer) -> float:
    """The share of its cache that is in use."""
    return server.metrics("vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc{}"]


def waiting(server: VllmServer) -> float:
    """How many requests wait in it."""
    return server.metrics("vllm:num_requests_waiting")["vllm:num_requests_waiting{}"]


@contextlib.contextmanager
def held_at(prefill: VllmServer, share: float) -> Iterator[None]:
    """Within the context the scheduler stands still amid a prompt, which has this share of the
    cache. Its workers go on. Nothing else may be in the cache."""
    core, deadline = core_of(prefill), time.monotonic() + _HOLD_S
    core.suspend()
    try:
        # In slices, so that it does not run away while the test looks.
        while used(prefill) < share:
            assert time.monotonic() < deadline, "the prompt did not begin"
            core.resume()
            time.sleep(_SLICE_S)
            core.suspend()
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            core.resume()


def is_idle(server: VllmServer) -> bool:
    """Whether nothing is left of its requests."""
    samples = server.metrics("vllm:num_requests_")
    running = [value for name, value in samples.items() if "{}" in name]
    return not (used(server) or server.metric("disagg_leases_held") or any(running))


def check_idle(*servers: VllmServer) -> None:
    """That they come to be idle."""
    for server in servers:
        assert eventually(lambda server=server: is_idle(server), _IDLE_S), server.name
