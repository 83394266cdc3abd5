"""Both legs at once: decode follows the lease of a prompt that prefill still computes.

An answer of a prefill engine invites consumers to do so (`disagg_invitation`). The router names the
stream in both legs, by a random number that no client learns. Decode asks prefill again and again
whether it has begun with the prompt, so its leg is sent shortly before that, by estimate. A prompt
of which too little could be hidden (`why_whole`) is handed off as a whole.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from disagg.config import Follow
from disagg.router.api.bodies import INVITATION, STREAM
from disagg.router.api.errors import ApiError
from disagg.router.pairing.in_flight import InFlight
from disagg.router.request.decode_leg import Opened
from disagg.router.request.plan import RequestPlan
from disagg.router.topology import EngineEndpoint

# Of the estimated wait: prefill may be faster, and a leg that is sent early costs little.
_PATIENCE = 0.7
OpenEarly: TypeAlias = Callable[[EngineEndpoint, dict[str, Any]], Awaitable[Opened]]
"""Opens decode's leg with these params, before this prefill engine has answered."""


def why_whole(
    follow: Follow, tokens: int, step_tokens: int, prefill: EngineEndpoint, decode: EngineEndpoint
) -> Literal["one_step", "same_host"] | None:
    """Why decode waits for the whole prompt of so many tokens; None if it follows its lease.

    follow: `router.pairing.follow`. step_tokens: what prefill computes in one step. A prompt of one
    step has nothing to hide a transfer behind. On one host a transfer takes some milliseconds, and
    a decode engine that follows takes more than that from the cores it shares with prefill.
    """
    if tokens <= step_tokens:
        return "one_step"
    if follow == "auto" and _host(prefill.url) == _host(decode.url):
        return "same_host"
    return None


@lru_cache(maxsize=1024)
def _host(url: str) -> str:
    """The host that an engine's URL names. All names of loopback are one: the router's own host."""
    name = (urlsplit(url).hostname or "").removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name
    return "localhost" if address.is_loopback else address.compressed


class Invitation(NamedTuple):
    """As the prefill engine gave it. step_tokens: what it computes of a prompt in one step."""

    given: Mapping[str, Any]
    step_tokens: int


class Invitations:
    """The last one of each prefill engine."""

    def __init__(self) -> None:
        self._of: dict[str, Invitation] = {}
        self._fewest = 0

    def note(self, engine: EngineEndpoint, params: Mapping[str, Any]) -> None:
        """Read the params that the engine answered."""
        given = params.get(INVITATION)
        tokens = given.get("step_tokens") if isinstance(given, dict) else None
        if isinstance(given, dict) and isinstance(tokens, int) and tokens > 0:
            self._of[engine.name] = Invitation(given, tokens)
        else:
            self._of.pop(engine.name, None)
        self._count_fewest()

    def forget(self, engine: str) -> None:
        """The engine may have ended; another life of it invites anew."""
        self._of.pop(engine, None)
        self._count_fewest()

    def _count_fewest(self) -> None:
        self._fewest = min((one.step_tokens for one in self._of.values()), default=0)

    def of(self, engine: EngineEndpoint) -> Invitation | None:
        """The engine's invitation, if it has given one."""
        return self._of.get(engine.name)

    def any_for_prompt(self, tokens: int) -> bool:
        """Whether some engine would take several steps for such a prompt."""
        return bool(self._of) and tokens > self._fewest


class EarlyDecode:
    """The decode leg of one request, while its prefill leg runs. decode: the engine that it goes
    to. follow: `router.pairing.follow`."""

    def __init__(
        self,
        plan: RequestPlan,
        decode: EngineEndpoint,
        follow: Follow,
        invitations: Invitations,
        in_flight: InFlight,
        open_: OpenEarly,
    ) -> None:
        self._plan, self._decode, self._follow = plan, decode, follow
        self._invitations, self._in_flight, self._open = invitations, in_flight, open_
        self._task: asyncio.Task[Opened] | None = None
        self._answered = asyncio.get_running_loop().create_future()
        self.was_sent = False
        """Whether decode's leg was sent, so that its seat is taken."""
        self.why_not_sent = "not_sent"
        """The outcome to count if it was not: as `why_whole` says, or `not_sent`."""

    def begins(self, prefill: EngineEndpoint) -> Mapping[str, Any]:
        """The prefill leg is about to be sent to this engine. Returns what to add to its params."""
        invitation = self._invitations.of(prefill)
        if invitation is None or self.was_sent:
            return {}
        step_tokens = invitation.step_tokens
        whole = why_whole(self._follow, self._plan.tokens, step_tokens, prefill, self._decode)
        self.why_not_sent = whole or "not_sent"
        if whole:
            return {}
        stream = secrets.token_hex(16)
        params = {"do_remote_prefill": True, INVITATION: invitation.given, STREAM: stream}
        delay_s = _PATIENCE * self._in_flight.reading_s(prefill)
        self._task = asyncio.create_task(self._send(prefill, params, delay_s))
        return {STREAM: stream}

    def failed(self, prefill: EngineEndpoint) -> None:
        """The prefill leg failed there."""
        self._invitations.forget(prefill.name)
        self.cancel()

    def cancel(self) -> None:
        """Nobody wants this leg any more. If it was sent, its connection is closed."""
        task, self._task = self._task, None
        if task is not None and not task.cancel() and not task.cancelled():
            if task.exception() is None:
                task.result().close()

    async def first_of(self, prefill: asyncio.Task[Any]) -> Opened | None:
        """Wait until the prefill leg has ended. Returns decode's answer if it came before that:
        then decode has computed the prompt itself."""
        await asyncio.wait({prefill, self._answered}, return_when=asyncio.FIRST_COMPLETED)
        if prefill.done() or self._task is None:
            return None
        task, self._task = self._task, None
        return await task

    async def opened(self) -> Opened | None:
        """Decode's answer; None if its leg was not sent, or failed as another may not."""
        task, self._task = self._task, None
        if task is None:
            return None
        if not self.was_sent:
            task.cancel()
            return None
        try:
            return await task
        except ApiError:
            return None
        except BaseException:
            task.cancel()
            raise

    async def _send(
        self, prefill: EngineEndpoint, params: dict[str, Any], delay_s: float
    ) -> Opened:
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        self.was_sent = True
        opened = await self._open(prefill, params)
        self._answered.set_result(None)
        return opened
