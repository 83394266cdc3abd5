"""Both legs of a request: the prefill leg, unless decode computes the prompt, and the decode leg.

The service runs them for a request, and failover runs them again for the rest of its answer. An
upstream connection that is not wanted any more is closed at once, so that its engine aborts. A
lease that nobody will fetch is released.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping
from typing import Any

import aiohttp
from starlette.responses import Response

from disagg.config import ConnectorName, RouterSection
from disagg.router.api import bodies
from disagg.router.api.bodies import NOTHING_MORE
from disagg.router.api.errors import ApiError
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.engines.health import Health
from disagg.router.engines.lease_releases import LeaseReleases, Prefilled
from disagg.router.pairing.admission import Admission
from disagg.router.pairing.idle_prefill import IdlePrefill
from disagg.router.pairing.in_flight import InFlight, Seat
from disagg.router.pairing.local_prefill import LocalPrefill
from disagg.router.pairing.policies import Pairer
from disagg.router.pairing.prefix_memory import PrefixMemory
from disagg.router.pairing.sharing import Sharing
from disagg.router.request.decode_leg import Call, DecodeLeg, Opened
from disagg.router.request.follow import EarlyDecode, Invitations
from disagg.router.request.plan import RequestPlan
from disagg.router.request.prefill_leg import PrefillLeg
from disagg.router.request.source_leg import SourceLeg
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import client as upstream
from disagg.router.upstream import http1
from disagg.router.upstream.response import UpstreamResponse


class Legs:
    """`client`: of the connections that carry legs. `strict`: a prompt that could not be handed
    off is an error."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        client: http1.Client,
        pairer: Pairer,
        in_flight: InFlight,
        admission: Admission,
        health: Health,
        metrics: RouterMetrics,
        settings: RouterSection,
        *,
        strict: bool,
        connector: ConnectorName,
        caches: EngineCaches | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._client, self._metrics = client, metrics
        self._releases = LeaseReleases(session, metrics)
        self._sources: SourceLeg | None = None
        if sharing is not None:
            limits = settings.limits
            self._sources = SourceLeg(client, sharing, in_flight, metrics, limits)
        self._caches = caches if settings.pairing.decode == "cache_aware" else None
        self._pairer, self._in_flight, self._admission = pairer, in_flight, admission
        self._limits, self._pairing = settings.limits, settings.pairing
        self._prefill = PrefillLeg(
            client,
            admission,
            health,
            metrics,
            settings.limits,
            strict=strict,
            gives_params=connector != "example",
            caches=caches,
            sources=self._sources,
            releases=self._releases,
        )
        self.decode_leg = DecodeLeg(admission, health, metrics, settings.limits)
        self.answered = PrefixMemory()
        """Which decode engines answered which prompts."""
        self.invitations = Invitations()
        """To follow the leases of prefill engines."""
        self._may_follow = connector == "disagg" and settings.pairing.follow is not False
        self._idle_prefill = IdlePrefill(metrics)
        share = settings.pairing.prefill_wait_share
        self._local_prefill = None if share is None else LocalPrefill(share)

    async def open(
        self,
        plan: RequestPlan,
        seat: Seat,
        header: bytes,
        record: Record,
        more: Mapping[str, Any] = NOTHING_MORE,
    ) -> Opened | Response:
        """Both legs, up to the first bytes of decode's answer, or an answer that is final already.

        `more`: fields to add to decode's body. Gives the seat up if decode gives no answer. Raises
        `ApiError`.
        """
        if self._may_follow and self.invitations.any_for_prompt(plan.tokens):
            return await self._at_once(plan, seat, header, record, more)
        prefilled = await self.prefill(plan, seat, header, record)
        if isinstance(prefilled, Response):
            return prefilled
        return await self.decode(plan, seat, prefilled, header, record, more)

    async def _at_once(
        self,
        plan: RequestPlan,
        seat: Seat,
        header: bytes,
        record: Record,
        more: Mapping[str, Any],
    ) -> Opened | Response:
        """As `open`, where decode's leg may be sent before prefill has answered."""
        limit_s = self._limits.prefill_timeout_s + self._limits.first_byte_timeout_s

        async def open_early(prefill: EngineEndpoint, params: dict[str, Any]) -> Opened:
            record.early_s = record.elapsed()
            call = self._call(plan, params, header, more, limit_s)
            return await self.decode_leg.open(
                call, seat, plan, record, partner=prefill, attempts=1, limit_s=limit_s
            )

        early = EarlyDecode(
            plan, seat.engine, self._pairing.follow, self.invitations, self._in_flight, open_early
        )
        leg = self._prefilled(plan, seat, header, record, NOTHING_MORE, early)
        prefill = asyncio.create_task(leg)
        try:
            opened = await early.first_of(prefill)
            if opened is not None:
                prefill.cancel()
                self._note_followed("computed", record)
                self._decode_began(plan, None, opened, record, record.elapsed())
                return opened
            prefilled = prefill.result()
        except BaseException:
            # The leg may have ended in the very moment in which its client left.
            if not prefill.cancel():
                self._give_back_of(prefill)
            early.cancel()
            seat.leave()
            raise
        if prefilled is None or isinstance(prefilled, Response):
            early.cancel()
        if isinstance(prefilled, Response):
            seat.leave()
            return prefilled
        prefilled_s = record.elapsed()
        try:
            opened = await early.opened()
        except BaseException:
            self._releases.give_back(prefilled)
            raise
        if opened is not None and prefilled is not None:
            self._note_followed("followed", record)
            self._decode_began(plan, prefilled, opened, record, prefilled_s)
            return opened
        if early.was_sent:
            self._note_followed("failed", record)
            seat = await self._other_seat(plan, seat, prefilled)
        else:
            self._note_followed(early.why_not_sent, record)
        return await self.decode(plan, seat, prefilled, header, record, more)

    def _give_back_of(self, prefill: asyncio.Task[Prefilled | Response | None]) -> None:
        """Release the lease of a prefill leg that has ended, if it has one."""
        if not prefill.cancelled() and prefill.exception() is None:
            ended = prefill.result()
            self._releases.give_back(ended if isinstance(ended, Prefilled) else None)

    def _note_followed(self, outcome: str, record: Record) -> None:
        self._metrics.followed.labels(outcome).inc()
        record.followed = outcome

    async def _other_seat(self, plan: RequestPlan, seat: Seat, prefilled: Prefilled | None) -> Seat:
        """For a decode leg that did not begin at this seat. Raises `ApiError`."""
        partner = prefilled.prefill if prefilled else None
        try:
            for tried in ([seat.engine], []):
                other = await self._admission.seat("decode", plan, tried, partner, is_admitted=True)
                if other is not None:
                    return other
            raise ApiError(503, "no decode engine is up")
        except BaseException:
            self._releases.give_back(prefilled)
            raise

    async def prefill(
        self,
        plan: RequestPlan,
        seat: Seat,
        header: bytes,
        record: Record,
        more: Mapping[str, Any] = NOTHING_MORE,
    ) -> Prefilled | Response | None:
        """The prefill leg: what decode fetches, an answer that is final, or None if decode
        computes the prompt.

        `seat`: at the decode engine; given up if the answer is final, or at an error. `more`:
        fields to add to the leg's body.
        """
        try:
            prefilled = await self._prefilled(plan, seat, header, record, more)
        except BaseException:
            seat.leave()
            raise
        if isinstance(prefilled, Response):
            seat.leave()
        return prefilled

    async def _prefilled(
        self,
        plan: RequestPlan,
        seat: Seat,
        header: bytes,
        record: Record,
        more: Mapping[str, Any],
        early: EarlyDecode | None = None,
    ) -> Prefilled | Response | None:
        """As `prefill`, but keeps the seat. `early`: the decode leg, if it may begin meanwhile."""
        reason = self._why_local(plan, seat)
        self._idle_prefill.note(reason, is_idle=self._prefill_is_idle())
        if reason is not None:
            self._prefill.skip(reason, record)
            seat.reads(self._unknown_tokens(plan, seat))
            return None
        if self._sources is not None:
            found = await self._from_source(self._sources, plan, seat, header, record)
            if found is not None:
                return found
        prefilled = await self._prefill.run(plan, seat.engine, header, record, more, early)
        if prefilled is not None and not isinstance(prefilled, Response):
            self._releases.hold(prefilled)
            if self._may_follow:
                self.invitations.note(prefilled.prefill, prefilled.params)
        return prefilled

    async def _from_source(
        self, sources: SourceLeg, plan: RequestPlan, seat: Seat, header: bytes, record: Record
    ) -> Prefilled | None:
        """What decode fetches of another engine's cache, if it then computes the little that is
        left itself."""
        left = sources.left(plan)
        if left > self._pairing.local_prefill_tokens:
            return None
        lent = await sources.run(plan, seat.engine, header, record)
        if lent is None:
            return None
        self._prefill.skip("prefix_elsewhere", record)
        seat.reads(plan.tokens - lent.source.tokens)
        self._releases.hold(lent.lease)
        return lent.lease

    async def decode(
        self,
        plan: RequestPlan,
        seat: Seat,
        prefilled: Prefilled | None,
        header: bytes,
        record: Record,
        more: Mapping[str, Any] = NOTHING_MORE,
        *,
        prompt: RequestPlan | None = None,
    ) -> Opened:
        """The decode leg, up to the first bytes of the answer.

        `more`: fields to add to the leg's body. `prompt`: has the client's prompt, if `plan` is the
        rest of an answer. If there is no answer, gives the seat up and the lease back. Raises
        `ApiError`.
        """
        prefilled_s = record.elapsed()
        params = prefilled.params if prefilled else None
        try:
            call = self._call(plan, params, header, more, self._limits.first_byte_timeout_s)
        except BaseException:
            seat.leave()
            self._releases.give_back(prefilled)
            raise
        partner = prefilled.prefill if prefilled else None
        try:
            opened = await self.decode_leg.open(call, seat, plan, record, partner=partner)
        except BaseException:
            self._releases.give_back(prefilled)
            raise
        self._decode_began(prompt or plan, prefilled, opened, record, prefilled_s)
        return opened

    def _call(
        self,
        plan: RequestPlan,
        params: dict[str, Any] | None,
        header: bytes,
        more: Mapping[str, Any],
        limit_s: float,
    ) -> Call:
        data = bodies.encoded(bodies.decode_body(plan.body, params, more))

        def call(engine: EngineEndpoint) -> Awaitable[UpstreamResponse]:
            return upstream.post_leg(self._client, engine, plan.path, data, header, limit_s)

        return call

    def _decode_began(
        self,
        prompt: RequestPlan,
        prefilled: Prefilled | None,
        opened: Opened,
        record: Record,
        prefilled_s: float,
    ) -> None:
        """Decode answers, and has what it needs of prefill. `prompt`: has the client's prompt."""
        if opened.status >= 400:
            self._releases.give_back(prefilled)
        else:
            if self._pairing.local_prefill_tokens:
                self.answered.sent(prompt.prefixes.keys, opened.engine.name)
            self._releases.fetched(prefilled)
            if prefilled is not None:
                self._metrics.paired(prefilled.prefill.name, opened.engine.name)
                self._metrics.handoff_time.observe(record.elapsed() - prefilled_s)

    def give_back(self, prefilled: Prefilled) -> None:
        """Release the lease: nobody will fetch it."""
        self._releases.give_back(prefilled)

    def running(self) -> dict[str, int]:
        """How much each engine is needed for, by name: requests at it, and leases to be fetched."""
        return dict(self._releases.by_engine() + Counter(self._in_flight.by_engine()))

    async def close(self) -> None:
        """Wait for releases under way, then close the connections of legs."""
        await self._releases.close()
        self._client.close()

    # ---- whether decode computes the prompt ----------------------------------------------------

    def _why_local(self, plan: RequestPlan, seat: Seat) -> str | None:
        """Why decode computes the prompt itself; None if prefill computes it."""
        most = self._pairing.local_prefill_tokens
        if plan.not_split is not None or not most:
            return plan.not_split
        if plan.tokens <= most:
            return "short_prompt"
        if self._unknown_tokens(plan, seat) <= most:
            return "prefix_known"
        return "prefill_busy" if self._prefill_is_busy(plan, seat) else None

    def _unknown_tokens(self, plan: RequestPlan, seat: Seat) -> int:
        """About how many of the prompt's tokens the decode engine does not hold."""
        if not self._pairing.local_prefill_tokens:
            return plan.tokens
        name, caches = seat.engine.name, self._caches
        if caches is not None and plan.blocks is not None and caches.tells(name):
            return max(0, plan.tokens - caches.held(plan.blocks, plan.model, name).tokens)
        known = self.answered.known(plan.prefixes.keys, name)
        return round(plan.tokens * (1 - plan.prefixes.known(known)))

    def _prefill_is_idle(self) -> bool:
        return self._in_flight.of_role("prefill") == 0 and self._pairer.serves("prefill")

    def _prefill_is_busy(self, plan: RequestPlan, seat: Seat) -> bool:
        """Whether computing the prompt at decode saves this request more time than it costs all
        requests that decode there, this one included."""
        if self._local_prefill is None:
            return False
        return self._local_prefill.is_worth_it(
            self._pairer.wait_s("prefill"),
            self._in_flight.reading_s(seat.engine),
            self._in_flight.takes_s(self._unknown_tokens(plan, seat)),
            self._in_flight.requests(seat.engine),
        )
