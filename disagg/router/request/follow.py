"""Both legs at once: decode follows the lease of a prompt that prefill still computes.

An answer of a prefill engine invites consumers to do so (`disagg_invitation`). The router names the
stream in both legs, by a random number that no client learns. Decode asks prefill again and again
whether it has begun with the prompt, so its leg is sent shortly before that, by estimate. Prompts
that prefill computes in one step gain nothing, and are handed off as a whole.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

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

    def for_prompt(self, engine: EngineEndpoint, tokens: int) -> Invitation | None:
        """The engine's invitation, if such a prompt takes it several steps."""
        found = self._of.get(engine.name)
        return found if found is not None and tokens > found.step_tokens else None

    def any_for_prompt(self, tokens: int) -> bool:
        """Whether some engine would take several steps for such a prompt."""
        return bool(self._of) and tokens > self._fewest


class EarlyDecode:
    """The decode leg of one request, while its prefill leg runs."""

    def __init__(
        self, plan: RequestPlan, invitations: Invitations, in_flight: InFlight, open_: OpenEarly
    ) -> None:
        self._plan, self._invitations, self._in_flight = plan, invitations, in_flight
        self._open = open_
        self._task: asyncio.Task[Opened] | None = None
        self._answered = asyncio.get_running_loop().create_future()
        self.was_sent = False
        """Whether decode's leg was sent, so that its seat is taken."""

    def begins(self, prefill: EngineEndpoint) -> Mapping[str, Any]:
        """The prefill leg is about to be sent to this engine. Returns what to add to its params."""
        invitation = self._invitations.for_prompt(prefill, self._plan.tokens)
        if invitation is None or self.was_sent:
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
