"""Both legs of a request at once: decode follows the lease while prefill computes the prompt."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from disagg.testing.followed_legs import (
    INVITATION,
    PATH,
    decode_params,
    is_idle,
    prefill_body,
    prefill_params,
)
from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.testing.waiting import eventually

TRIES = 5
STEPS_THAT_SHOW = 3
"""In so many steps, decode fetches some blocks before the last one, on a machine that is not so
busy that it comes too late."""
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
        body = prefill_body(prompt, prefill_params(stream), **options)
        sent = pool.submit(prefill.post, PATH, body)
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


def check_idle(*servers: VllmServer) -> None:
    """That they come to be idle."""
    for server in servers:
        assert eventually(partial(is_idle, server), _IDLE_S), server.name
