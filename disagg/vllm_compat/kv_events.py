"""Where an engine publishes its KV events, as vLLM tells since 0.31."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from disagg.vllm_compat import versions

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


TOLD_SINCE = "0.31"
"""The first vLLM that tells. Older ones would bind all addresses of the node."""


def are_told() -> bool:
    """Whether the installed vLLM tells."""
    return versions.matches(f">={TOLD_SINCE}")


class KvEventAddresses(NamedTuple):
    """ZMQ addresses that others can connect to."""

    endpoint: str
    replay: str | None


def kv_event_addresses(engine: EngineClient) -> KvEventAddresses | None:
    """Of this engine, one data parallel rank. None if it publishes none, publishes at all addresses
    of its node, or to another process that collects them."""
    ask = getattr(engine, "get_kv_event_sources", None)
    for source in (ask() if ask is not None else {}).values():
        if source.publisher == "zmq" and _is_one(source.endpoint):
            replay = source.replay_endpoint
            return KvEventAddresses(source.endpoint, replay if _is_one(replay) else None)
    return None


def _is_one(address: str | None) -> bool:
    return address is not None and address.startswith(("tcp://", "ipc://")) and "*" not in address
