"""Both legs of a request that are sent at once, so that decode follows the lease while prefill
computes the prompt. Prefill can be held amid the prompt, and each client may leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from disagg.router.api import bodies
from disagg.router.api.bodies import PARAMS, REMOTE_DECODE
from disagg.testing.vllm_server import VllmServer, completion
from disagg.testing.waiting import eventually

PATH = "/v1/completions"
STREAM, INVITATION = bodies.STREAM, bodies.INVITATION
_HOLD_S = 60.0
T = TypeVar("T")


def prefill_params(stream: str) -> dict[str, Any]:
    """What makes a prefill's lease grow under this name."""
    return {**REMOTE_DECODE, STREAM: stream}


def decode_params(invited: dict[str, Any], stream: str) -> dict[str, Any]:
    """What makes decode follow that lease. invited: what an earlier answer of prefill had."""
    return {"do_remote_prefill": True, INVITATION: invited, STREAM: stream}


def prefill_body(prompt: Any, params: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The prefill leg of a completion."""
    begins = {**completion(prompt, **options), "max_tokens": 1, "min_tokens": 0, "n": 1}
    return {**begins, PARAMS: params}


class Leg:
    """A request that was sent, and that its client may leave. Reading it has a deadline."""

    def __init__(
        self, server: VllmServer, body: dict[str, Any], path: str = PATH, timeout_s: float = 120
    ) -> None:
        port = server.port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        content = json.dumps({"model": "tiny", **body})
        self._connection.request("POST", path, content, {"content-type": "application/json"})

    @property
    def is_answered(self) -> bool:
        """Whether there is some of an answer, or its end."""
        return bool(select.select([self._connection.sock], [], [], 0)[0])

    def answer(self) -> dict[str, Any]:
        """Wait for it. Raises RuntimeError unless the status is 200, TimeoutError, and other
        OSErrors and HTTPExceptions if the server is gone."""
        response = self._connection.getresponse()
        content = response.read()
        self.leave()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {content.decode(errors='replace')}")
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


def is_idle(server: VllmServer) -> bool:
    """Whether nothing is left of its requests."""
    samples = server.metrics("vllm:num_requests_")
    running = [value for name, value in samples.items() if "{}" in name]
    return not (used(server) or server.metric("disagg_leases_held") or any(running))


@contextlib.contextmanager
def held_at(prefill: VllmServer, share: float, send: Callable[[], T]) -> Iterator[T]:
    """Within the context the scheduler stands still amid a prompt, which has this share of the
    cache, or up to two steps more. Its workers go on. Nothing else may be in the cache, and the
    server `can_hold`. send: sends the prompt; what it returns is the context's. Raises TimeoutError
    if the prompt does not begin."""
    hold, held = prefill.hold_file, prefill.hold_file.with_name("held")
    held.unlink(missing_ok=True)
    written = hold.with_suffix(".new")
    written.write_text(str(share))
    written.rename(hold)
    try:
        sent = send()
        if not eventually(held.exists, _HOLD_S):
            raise TimeoutError(f"{prefill.name}: the prompt did not begin")
        yield sent
    finally:
        hold.unlink(missing_ok=True)
