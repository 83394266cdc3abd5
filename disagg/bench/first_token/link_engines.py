"""A prefill and a decode engine, each on a network of its own or both on this one, and the ways in
which a prompt goes from one to the other."""

from __future__ import annotations

import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from disagg.bench.first_token.pairs import Pair
from disagg.errors import StartupError
from disagg.testing.followed_legs import INVITATION, STREAM, decode_params
from disagg.testing.network import OWN_SYSFS, Link
from disagg.testing.openai_stream import stream
from disagg.testing.ports import free_port
from disagg.testing.vllm_server import VllmServer, completion, spawn, token_ids

BLOCK = 128
"""Tokens; `VllmServer`'s."""
_ANSWER_TOKENS = 8
_LEG_S = 300.0
_PIECE = 1 << 20
_REMOTE_COUNT = "remote_prefill_cached_tokens"


@dataclass(frozen=True)
class Place:
    """Where an engine runs. address: for the other engine. inside: for this thread's requests."""

    address: str
    inside: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Answer:
    """Of both legs. Seconds from the start: to decode's first token, to prefill's answer."""

    first_s: float
    prefilled_s: float
    tokens: list[int]


class Engines:
    """A prefill and a decode engine with one connector between them."""

    def __init__(
        self,
        pair: Pair,
        servers: Sequence[VllmServer],
        places: Sequence[Place],
        legs: ThreadPoolExecutor,
    ) -> None:
        self.pair, self._places, self._legs = pair, places, legs
        self.prefill, self.decode = servers
        self.invitation: dict[str, Any] | None = None
        """Of the last serial way: what streamed needs. None: this connector has none."""

    def alone(self, prompt: list[int]) -> float:
        """Seconds of a plain request to the prefill engine. Decode's is stopped meanwhile, since
        peers poll, and would take the cores."""
        self.decode.pause()
        try:
            began = time.monotonic()
            self.computed(prompt, 1)
            return time.monotonic() - began
        finally:
            self.decode.resume()

    def beside(self, prompt: list[int], link: Link, size: int) -> float:
        """As `alone`, while plain sockets carry so many bytes over the link."""
        moved = self._legs.submit(carry, link, size)
        taken_s = self.alone(prompt)
        moved.result(_LEG_S)
        return taken_s

    def computed(self, prompt: list[int], tokens: int) -> list[int]:
        """The prefill engine's own answer."""
        with self._places[0].inside(), _explained(self.prefill):
            return token_ids(self.prefill.complete(prompt, max_tokens=tokens))[0]

    def serial(self, prompt: list[int]) -> Answer:
        """One leg after the other."""
        headers = _same_id(self.pair)
        began = time.monotonic()
        params, prefilled = self._prefilled(prompt, {}, headers)
        first, tokens = self._decoded(prompt, params, headers)
        self.invitation = (params or {}).get(INVITATION)  # engines may renew it
        return Answer(first - began, prefilled - began, tokens)

    def streamed(self, prompt: list[int]) -> Answer:
        """Both legs at once. Only after `serial` has found an invitation."""
        assert self.invitation is not None
        stream = secrets.token_hex(16)
        key = {STREAM: stream}
        params = decode_params(self.invitation, stream)
        began = time.monotonic()
        prefill = self._legs.submit(self._prefilled, prompt, key, None)
        decode = self._legs.submit(self._decoded, prompt, params, None)
        first, tokens = decode.result(_LEG_S)
        _, prefilled = prefill.result(_LEG_S)
        return Answer(first - began, prefilled - began, tokens)

    def _prefilled(
        self, prompt: list[int], more: dict[str, Any], headers: dict[str, str] | None
    ) -> tuple[dict[str, Any] | None, float]:
        """The prefill leg: decode's params, and when it answered."""
        with self._places[0].inside(), _explained(self.prefill):
            if not self.pair.hands_params:
                self.prefill.complete(prompt, max_tokens=1)
                return None, time.monotonic()
            params = self.prefill.prefill(prompt, more=more, headers=headers)
            return params, time.monotonic()

    def _decoded(
        self, prompt: list[int], params: dict[str, Any] | None, headers: dict[str, str] | None
    ) -> tuple[float, list[int]]:
        """The decode leg: when its first token came, and all tokens."""
        body = {"model": "tiny", **completion(prompt, max_tokens=_ANSWER_TOKENS, stream=True)}
        body["stream_options"] = {"include_usage": True}
        if params is not None:
            # vLLM would report this count of the prefill engine's instead of decode's own.
            own = {name: value for name, value in params.items() if name != _REMOTE_COUNT}
            body["kv_transfer_params"] = own
        first, tokens, usage = 0.0, list[int](), dict[str, Any]()
        with self._places[1].inside(), _explained(self.decode):
            for event in stream(f"{self.decode.url}/v1/completions", body, headers):
                for choice in event.get("choices", ()):
                    first = first or time.monotonic()
                    tokens += choice.get("token_ids") or ()
                usage = event.get("usage") or usage
            if not tokens:
                raise RuntimeError("its answer has no tokens")
        self._require_handed(len(prompt), usage)
        return first, tokens

    def _require_handed(self, length: int, usage: dict[str, Any]) -> None:
        """A decode engine that computed the prompt itself measured no handoff."""
        handed = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if handed < length - BLOCK:
            text = f"{self.decode.name} was handed {handed} of {length} tokens, and computed others"
            raise StartupError(text, self.decode.tail())

    def require_no_failure(self) -> None:
        """A load that fails after it was planned counts as handed in the usage."""
        with self._places[1].inside():
            failures = self.decode.metrics("disagg_kv_load_failures_total")
        if problems := [name for name, count in failures.items() if count]:
            raise StartupError(f"{self.decode.name}: {', '.join(problems)}", self.decode.tail())


@contextmanager
def _explained(server: VllmServer) -> Iterator[None]:
    """A request that fails is a StartupError with the end of the engine's log."""
    try:
        yield
    except (RuntimeError, httpx.HTTPError) as error:
        raise StartupError(f"{server.name}: {error!r}", server.tail()) from error


def _same_id(pair: Pair) -> dict[str, str] | None:
    return {"X-Request-Id": uuid.uuid4().hex} if pair.same_id else None


def carry(link: Link, size: int) -> None:
    """Carry so many bytes over the link, from its first network to its second."""
    with ExitStack() as stack:
        with link.networks[1].inside():
            listener = stack.enter_context(socket.create_server((link.addresses[1], 0)))
        with link.networks[0].inside():
            sends = stack.enter_context(socket.create_connection(listener.getsockname(), _LEG_S))
        listener.settimeout(_LEG_S)
        receives = stack.enter_context(listener.accept()[0])
        receives.settimeout(_LEG_S)
        sender = threading.Thread(target=_send, args=(sends, size), daemon=True)
        sender.start()
        left, buffer = size, bytearray(_PIECE)
        while left and (count := receives.recv_into(buffer)):
            left -= count
        sender.join(_LEG_S)


def _send(connection: socket.socket, size: int) -> None:
    piece = bytes(_PIECE)
    with suppress(OSError):  # the receiver then notices
        for at in range(0, size, _PIECE):
            connection.sendall(piece[: size - at])


def places(link: Link | None) -> Sequence[Place]:
    """Of the prefill and of the decode engine. None: both on this network."""
    if link is None:
        return [Place("127.0.0.1", nullcontext)] * 2
    both = zip(link.addresses, link.networks, strict=True)
    return [Place(address, network.inside) for address, network in both]


@contextmanager
def running(pair: Pair, model: Path, args: Sequence[str], link: Link | None) -> Iterator[Engines]:
    """Both engines, ready. Raises StartupError."""
    with ExitStack() as stack:
        legs = stack.enter_context(ThreadPoolExecutor(2))  # ends after the engines, so soon
        where, servers = places(link), list[VllmServer]()
        for side, place, role in zip(("prefill", "decode"), where, pair.roles, strict=True):
            config = {**pair.config, "kv_role": role}
            extra = config.get("kv_connector_extra_config", {})
            if pair.name == "ours":
                config["kv_connector_extra_config"] = {**extra, "host": place.address}
            env = {**pair.env, "VLLM_HOST_IP": "127.0.0.1"}  # vLLM's own processes
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = place.address
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            name = f"{pair.name} {side}"
            if link is not None:
                env["UCX_NET_DEVICES"] = link.device
            start = partial(spawn, before=() if link is None else OWN_SYSFS)
            server = VllmServer(
                name, model.absolute(), None, config, args, "float32", env, start=start
            )
            with place.inside():  # so its program starts there
                servers.append(stack.enter_context(server))
        for server, place in zip(servers, where, strict=True):
            with place.inside():
                server.wait_ready()
        yield Engines(pair, servers, where, legs)
