"""One request through both legs: admit, skip or prefill, decode, relay, give back what is unused.

The upstream's status is known before the client's answer begins. Whatever ends a request
early (the client leaves, an engine refuses or dies) closes the upstream connection at once,
so the engine aborts, and releases a lease that nobody will fetch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any
from urllib.parse import unquote

import aiohttp
from starlette.datastructures import Headers
from starlette.responses import Response
from yarl import URL

from disagg.config import ConnectorName, RouterSection
from disagg.router.api import bodies, paths
from disagg.router.api.errors import ApiError
from disagg.router.api.event_stream import Plain, Watcher
from disagg.router.engines import broadcast
from disagg.router.engines.compatibility import Compatibility
from disagg.router.engines.health import Health
from disagg.router.engines.lease_releases import LeaseReleases, Prefilled
from disagg.router.engines.lora_adapters import LoraAdapters
from disagg.router.pairing.admission import Admission
from disagg.router.pairing.first_token_hold import FirstTokenHold
from disagg.router.pairing.in_flight import InFlight, Seat
from disagg.router.pairing.local_prefill import LocalPrefill
from disagg.router.pairing.policies import Pairer
from disagg.router.pairing.prefix_memory import PrefixMemory
from disagg.router.pairing.request_info import RequestInfo
from disagg.router.request import first_token, stream_state
from disagg.router.request.decode_leg import DecodeLeg, Opened
from disagg.router.request.failover import Failover
from disagg.router.request.first_token import Begun
from disagg.router.request.prefill_leg import PrefillLeg
from disagg.router.request.relay import Progress, Relayed
from disagg.router.request.replay import Replay, repeats
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint, Topology
from disagg.router.upstream import client as upstream
from disagg.router.upstream import http1
from disagg.router.upstream.response import UpstreamResponse


class Service:
    """Everything a request needs; one per app."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        legs_client: http1.Client,
        topology: Topology,
        health: Health,
        metrics: RouterMetrics,
        compatibility: Compatibility,
        settings: RouterSection,
        *,
        strict: bool,
        connector: ConnectorName,
    ) -> None:
        self.client, self._legs = client, legs_client
        self._metrics, self._settings = metrics, settings
        in_flight = InFlight(metrics)
        pairer = Pairer(topology, settings.pairing, in_flight, health, compatibility)
        self._pairer, self._in_flight = pairer, in_flight
        self._admission = Admission(pairer, in_flight, settings.limits, metrics)
        self._prefill = PrefillLeg(
            legs_client,
            self._admission,
            health,
            metrics,
            settings.limits,
            strict=strict,
            gives_params=connector != "example",
        )
        self._decode = DecodeLeg(self._admission, health, metrics, settings.limits)
        self._releases = LeaseReleases(client, metrics)
        self._held = PrefixMemory()
        self._compatibility = compatibility
        # Whoever else's engines take no lease for a longer prompt than its own.
        self._begins_at_prefill = (
            settings.pairing.first_token == "prefill" and connector == "disagg"
        )
        self._first_token_hold = FirstTokenHold(settings.pairing.first_token_hold_s)
        share = settings.pairing.prefill_wait_share
        self._local_prefill = None if share is None else LocalPrefill(share)
        self._topology = topology
        self.adapters = LoraAdapters(
            client, health, settings.limits.first_byte_timeout_s, self.engines_changed
        )
        self._failover = Failover(self, client, self._admission, compatibility, metrics, settings)

    async def complete(
        self, path: str, body: dict[str, Any], headers: Headers, record: Record
    ) -> Response | Relayed:
        """Serve what is asked at one of `paths.PAIRED`; raises `ApiError`."""
        body = bodies.without_params(body)
        sent = upstream.leg_header(upstream.to_engine(headers.raw, record.id, record.trace))
        request = RequestInfo(path, body, headers)
        self._check_length(request)
        migrates = self._migrates()
        watches = migrates or self._begins_at_prefill
        stream = stream_state.watched(path, body) if watches else None
        if stream is not None and migrates:
            request = RequestInfo(path, stream.leg_body, headers)
        seat = await self._seat(request, record)
        said = self._compatibility.said(seat.engine)
        begins = (
            self._begins_at_prefill
            and stream is not None
            and first_token.may_begin(path, body, said)
        )
        alike = first_token.drawn_alike(body) if begins else {}
        asked = {**first_token.ASKED, **alike} if begins else None
        prefilled = await self._prefilled(request, seat, sent, record, asked)
        if isinstance(prefilled, Response):
            return prefilled
        go_on = self._failover.of(request, sent, record)
        if begins and stream is not None and prefilled is not None:
            first = first_token.begin(path, body, said, prefilled.answer)
            if first is not None:
                begun = self._begun(stream, said, first, request, seat, prefilled, sent, record)
                return self._relayed(begun, record, watcher=stream, go_on=go_on)
        asks = request
        if alike and prefilled is not None:
            asks = RequestInfo(path, {**request.body, **alike}, headers)
        opened = await self._decoded(asks, request, seat, prefilled, sent, record)
        is_stream = opened.status == 200 and opened.is_events
        watcher: Watcher | None = None
        if is_stream:
            watcher = self._watcher(path, body, stream) if migrates else Plain(paths.ENDS[path])
        style = paths.style(path)
        return self._relayed(opened, record, watcher=watcher, go_on=go_on, style=style)

    async def forward(
        self, method: str, target: str, data: bytes, headers: Headers, record: Record
    ) -> Response | Relayed:
        """Pass any other request to a decode engine as it is, but without transfer params; to all
        engines, if it changes them.

        `target`: raw path and query. Raises `ApiError`.
        """
        data = bodies.passed_through(data, headers.get("content-type", ""))
        raw = upstream.to_engine(headers.raw, record.id, record.trace)
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
        limit = self._settings.limits.first_byte_timeout_s
        path = unquote(target.partition("?")[0])  # of `//[` URL would make a host, and fail
        if method == "POST" and path in broadcast.PATHS:
            engines = self._topology.engines
            answer = await broadcast.ask(self.client, engines, target, data, sent, limit)
            self.adapters.done(path, data)
            return answer
        request = RequestInfo(target, {}, headers)
        seat = await self._seat(request, record)

        def call(engine: EngineEndpoint) -> Awaitable[aiohttp.ClientResponse]:
            # Taken as encoded: tidying `..` would lead to paths that the app has refused.
            url = URL(f"{engine.url}{target}", encoded=True)
            answer = self.client.request(method, url, data=data or None, headers=sent)
            return upstream.head(answer, limit, "decode")

        opened = await self._decode.open(call, seat, request, record, attempts=1)
        return self._relayed(opened, record, counts=False)

    async def open(
        self, request: RequestInfo, seat: Seat, header: bytes, record: Record
    ) -> Opened | Response:
        """Both legs, as far as the answer's first bytes, or an answer that is final already.

        Gives the seat up if there is no such answer. Raises `ApiError`.
        """
        prefilled = await self._prefilled(request, seat, header, record)
        if isinstance(prefilled, Response):
            return prefilled
        return await self._decoded(request, request, seat, prefilled, header, record)

    async def _prefilled(
        self,
        request: RequestInfo,
        seat: Seat,
        header: bytes,
        record: Record,
        more: Mapping[str, Any] | None = None,
    ) -> Prefilled | Response | None:
        """The first leg, if there is one; gives up the seat at decode if its answer is final.
        `more`: see `legs.prefill_body`."""
        try:
            reason = self._local_reason(request, seat)
            if reason is not None:
                self._prefill.skip(reason, record)
                seat.reads(self._to_read(request, seat))
                return None
            request.partner = seat.engine
            prefilled = await self._prefill.run(request, header, record, more)
        except BaseException:
            seat.leave()
            raise
        if isinstance(prefilled, Response):
            seat.leave()
        return prefilled

    def _begun(
        self,
        stream: stream_state.Stream,
        said: Mapping[str, str],
        first: bytes,
        request: RequestInfo,
        seat: Seat,
        prefilled: Prefilled,
        header: bytes,
        record: Record,
    ) -> Begun:
        self._metrics.first_tokens.inc()

        async def decode() -> Opened:
            rest = RequestInfo(paths.COMPLETION, stream.follows(said), request.headers)
            opened = await self._decoded(rest, request, seat, prefilled, header, record)
            if opened.status != 200 or not opened.is_events:
                opened.close()
                raise ApiError(502, "the decode engine refused what prefill had begun")
            return opened

        hold_s = self._first_token_hold.of(record.elapsed())
        return Begun(first, seat, decode, lambda: self._releases.give_back(prefilled), hold_s)

    async def _decoded(
        self,
        request: RequestInfo,
        prompt: RequestInfo,
        seat: Seat,
        prefilled: Prefilled | None,
        header: bytes,
        record: Record,
    ) -> Opened:
        """The second leg, as far as the answer's first bytes. Gives the seat up, and back what was
        handed over, if there are none. `prompt`: has the client's. Raises `ApiError`."""
        prefilled_s = record.elapsed()
        request.partner = prefilled.prefill if prefilled else None
        try:
            data = bodies.encoded(
                bodies.decode_body(request.body, prefilled.params if prefilled else None)
            )
        except BaseException:
            seat.leave()
            self._releases.give_back(prefilled)
            raise

        limit = self._settings.limits.first_byte_timeout_s

        def call(engine: EngineEndpoint) -> Awaitable[UpstreamResponse]:
            return upstream.post_leg(self._legs, engine, request.path, data, header, limit)

        try:
            opened = await self._decode.open(call, seat, request, record)
        except BaseException:
            self._releases.give_back(prefilled)
            raise
        if opened.status >= 400:
            self._releases.give_back(prefilled)
        else:
            self._held.note(self._prefix_keys(prompt), opened.engine.name)
            if prefilled is not None:
                self._metrics.paired(prefilled.prefill.name, opened.engine.name)
                self._metrics.handoff_time.observe(record.elapsed() - prefilled_s)
        return opened

    def engines_changed(self) -> None:
        """Who waits for an engine may have one now."""
        self._admission.admit_waiting()

    async def close(self) -> None:
        """Let releases that are under way end."""
        await self.adapters.close()
        await self._releases.close()
        self._legs.close()

    def _watcher(
        self, path: str, body: dict[str, Any], stream: stream_state.Stream | None
    ) -> Watcher:
        """Of a stream that may go on elsewhere, if it can."""
        if stream is not None:
            return stream
        return Replay(path) if repeats(path, body) else Plain(paths.ENDS[path])

    def _migrates(self) -> bool:
        # With one decode engine there is nobody to go on, and no reason to watch streams.
        return self._settings.migration_limit > 0 and len(self._topology.of("decode")) > 1

    # ---- what a request gets -------------------------------------------------------------------

    def _check_length(self, request: RequestInfo) -> None:
        limit = self._settings.limits.max_prompt_tokens
        if limit is not None and request.tokens > limit:
            raise ApiError(
                400,
                f"the prompt has about {request.tokens} tokens, and {limit} are allowed "
                "(router.limits.max_prompt_tokens)",
            )

    async def _seat(self, request: RequestInfo, record: Record) -> Seat:
        seat = await self._admission.seat("decode", request)
        if seat is None:
            raise ApiError(503, "no decode engine is known", {"Retry-After": "1"})
        record.queued_s = record.elapsed()
        return seat

    def _local_reason(self, request: RequestInfo, seat: Seat) -> str | None:
        """Why decode shall compute the prompt itself; None if prefill shall."""
        reason = bodies.local_reason(request.body, request.path)
        most = self._settings.pairing.local_prefill_tokens
        if reason is not None or not most:
            return reason
        if request.tokens <= most:
            return "short_prompt"
        if self._to_read(request, seat) <= most:
            return "prefix_known"
        return "prefill_busy" if self._prefill_is_busy(request, seat) else None

    def _to_read(self, request: RequestInfo, seat: Seat) -> int:
        """About how many of the prompt's tokens the decode engine does not have."""
        known = self._held.tokens(self._prefix_keys(request), seat.engine.name)
        return max(0, request.tokens - known)  # what is known comes in whole chunks

    def _prefill_is_busy(self, request: RequestInfo, seat: Seat) -> bool:
        """Whether the prompt would come to its turn so much sooner where it is decoded that this
        is worth what all who are there (itself among them) wait while it is read."""
        if self._local_prefill is None:
            return False
        return self._local_prefill.is_worth_it(
            self._pairer.wait_s("prefill", request),
            self._in_flight.reading_s(seat.engine),
            self._in_flight.takes_s(self._to_read(request, seat)),
            self._in_flight.requests(seat.engine),
        )

    def _prefix_keys(self, request: RequestInfo) -> list[int]:
        return request.prefix_keys if self._settings.pairing.local_prefill_tokens else []

    def _relayed(
        self, opened: Opened | Begun, record: Record, *, counts: bool = True, **more: Any
    ) -> Relayed:
        """`counts`: towards the time to first token, and between tokens."""

        def first_byte() -> None:
            record.first_byte_s = record.elapsed()
            if counts:
                self._metrics.ttft.observe(record.first_byte_s)

        def ended(chunks: int) -> None:
            if counts and chunks > 1 and record.first_byte_s is not None:
                seconds = record.elapsed() - record.first_byte_s
                self._metrics.between_chunks.observe(seconds / (chunks - 1))

        silence_s = self._settings.limits.between_bytes_timeout_s
        progress = Progress(first_byte, ended)
        return Relayed(opened, record.id, silence_s, progress, **more)
