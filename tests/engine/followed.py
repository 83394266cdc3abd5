"""Both legs of a request at once: decode follows the lease while prefill computes the prompt."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from disagg.connector.handoff.kv_transfer_params import INVITATION, STREAM
from disagg.router.api.bodies import REMOTE_DECODE
from disagg.testing.vllm_server import VllmServer, completion


def invitation(prefill: VllmServer) -> dict[str, Any]:
    """What an earlier answer of the prefill engine has."""
    params = prefill.prefill([300, 301, 302])
    found: dict[str, Any] = params[INVITATION]
    return found


def prefill_params(stream: str) -> dict[str, Any]:
    """What makes a prefill's lease grow under this name."""
    return {**REMOTE_DECODE, STREAM: stream}


def decode_params(invited: dict[str, Any], stream: str) -> dict[str, Any]:
    """What makes decode follow that lease."""
    return {"do_remote_prefill": True, INVITATION: invited, STREAM: stream}


def handed_off(
    prefill: VllmServer,
    decode: VllmServer,
    prompt: Any,
    invited: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Decode's answer to a request whose legs were sent at once."""
    stream, invited = secrets.token_hex(16), invited or invitation(prefill)
    with ThreadPoolExecutor(1) as pool:
        begins = {**completion(prompt, **options), "max_tokens": 1, "min_tokens": 0, "n": 1}
        begins["kv_transfer_params"] = prefill_params(stream)
        sent = pool.submit(prefill.post, "/v1/completions", begins)
        params = decode_params(invited, stream)
        answer = decode.complete(prompt, kv_transfer_params=params, **options)
        assert sent.result().status_code == 200
    return answer
