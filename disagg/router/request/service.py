"""One request, from its parsed body to its answer.

`complete` makes the request's plan, waits for a seat at a decode engine, runs the legs (`legs.py`)
and relays the answer (`relay.py`). The engine's status is known before the client's answer begins.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, get_args
from urllib.parse import unquote

import aiohttp
import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from yarl import URL

from disagg.config import ConnectorName, Role, RouterSection
from disagg.router.api import bodies, paths
from disagg.router.api.bodies import NOTHING_MORE
from disagg.router.api.errors import ApiError
from disagg.router.api.event_stream import Plain, Watcher
from disagg.router.caches.engine_caches import EngineCaches
from disagg.router.engines import broadcast
from disagg.router.engines.compatibility import SCHEDULING, Compatibility
from disagg.router.engines.health import Health
from disagg.router.engines.lease_releases import Prefilled
from disagg.router.engines.lora_adapters import LoraAdapters
from disagg.router.pairing.admission import Admission
from disagg.router.pairing.fair_queue import Served
from disagg.router.pairing.first_token_hold import FirstTokenHold
from disagg.router.pairing.in_flight import InFlight, Seat
from disagg.router.pairing.other_routers import MemoryName, OtherRouters, Report, Sent
from disagg.router.pairing.policies import Pairer
from disagg.router.pairing.prefix_memory import PrefixMemory
from disagg.router.pairing.rate_limits import RateLimits
from disagg.router.pairing.sharing import Moves, Sharing
from disagg.router.request import first_token, stream_state
from disagg.router.request.decode_leg import Opened
from disagg.router.request.failover import Failover
from disagg.router.request.first_token import Begun
from disagg.router.request.keep_alive import KeptAlive, kept_alive
from disagg.router.request.legs import Legs
from disagg.router.request.metering import Metering
from disagg.router.request.plan import Estimates, RequestPlan
from disagg.router.request.relay import Progress, Relayed
from disagg.router.request.replay import Replay
from disagg.router.request.tokenize import Tokenize
from disagg.router.telemetry.access_log import Record
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint, Topology, role_of
from disagg.router.upstream import client as upstream
from disagg.router.upstream import http1

_WITH_IDS: Mapping[str, Any] = {"return_token_ids": True}

_REPORTS = msgspec.json.Decoder(Report)


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
        caches: EngineCaches | None = None,
    ) -> None:
        self.client = client
        self._topology, self._compatibility = topology, compatibility
        self._others = OtherRouters()
        metrics.other_routers.set_function(self._others.count)
        self._in_flight = in_flight = InFlight(metrics, self._others)
        self._metrics, self._settings = metrics, settings
        self._keep_alive_s = settings.stream_keep_alive_s
        sharing = None
        if settings.pairing.shares_caches and caches is not None and connector == "disagg":
            moves = Moves(in_flight, always=settings.pairing.share_caches == "always")
            sharing = Sharing(topology, caches, in_flight, health, compatibility, moves)
        pairer = Pairer(
            topology, settings.pairing, in_flight, health, compatibility, caches, sharing
        )
        served: dict[Role, Served] = {role: Served(settings.shares) for role in get_args(Role)}
        self._served = served["decode"]
        self._rate_limits = RateLimits(self._served.share, settings.processes)
        self._admission = Admission(pairer, in_flight, settings.limits, metrics, served)
        self._legs = Legs(
            client,
            legs_client,
            pairer,
            in_flight,
            self._admission,
            health,
            metrics,
            settings,
            strict=strict,
            connector=connector,
            caches=caches if settings.pairing.hears_caches else None,
            sharing=sharing,
        )
        self._memories: dict[MemoryName, PrefixMemory] = {
            **pairer.memories(),
            "answered": self._legs.answered,
        }
        # A lease of another connector serves no prompt that is longer than its own.
        self._begins_at_prefill = (
            settings.pairing.first_token == "prefill" and connector == "disagg"
        )
        self._first_token_hold = FirstTokenHold(settings.pairing.first_token_hold_s)
        self._estimates = Estimates(settings.pairing.media)
        asks = settings.pairing.hears_caches and settings.pairing.tokenize == "engine"
        self._tokenize = Tokenize(client, topology, health, metrics) if asks else None
        self.adapters = LoraAdapters(
            client, health, settings.limits.first_byte_timeout_s, self.engines_changed
        )
        self._failover = Failover(
            self._legs, client, self._admission, compatibility, metrics, settings
        )

    def complete(
        self, path: str, body: dict[str, Any], headers: Headers, record: Record
    ) -> Awaitable[Response | Relayed | KeptAlive]:
        """Serve a request at one of `paths.PAIRED`; raises `ApiError`."""
        work, interval_s = self._complete(path, body, headers, record), self._keep_alive_s
        if interval_s is None or body.get("stream") is not True:
            return work
        return kept_alive(work, interval_s, record.id, paths.style(path))

    async def _complete(
        self, path: str, body: dict[str, Any], headers: Headers, record: Record
    ) -> Response | Relayed:
        body = self._prioritized(bodies.without_params(body), record.key_name)
        plan = RequestPlan(path, body, headers, record.key_name, self._estimates)
        self._check_length(plan)
        self._meter(plan, record)
        if self._tokenize is not None:
            await self._tokenize.learn(plan)
        header = upstream.leg_header(upstream.to_engine(headers.raw, record.id, record.trace))
        may_fail_over = self._may_fail_over()
        more = _fields(plan, may_fail_over)
        seat = await self._seat(plan, record)
        reports = self._compatibility.said(seat.engine)
        if self._begins_at_prefill and first_token.may_begin(plan, reports):
            return await self._from_prefill(plan, seat, reports, header, record, may_fail_over)
        opened = await self._legs.open(plan, seat, header, record, more)
        if isinstance(opened, Response):
            return opened
        return self._decoded(plan, opened, header, record, may_fail_over)

    async def _from_prefill(
        self,
        plan: RequestPlan,
        seat: Seat,
        reports: Mapping[str, str],
        header: bytes,
        record: Record,
        may_fail_over: bool,
    ) -> Response | Relayed:
        """A stream that begins with prefill's token, unless prefill's answer does not fit that."""
        same_draw = first_token.same_draw(plan)
        asked = {**first_token.PREFILL_FIELDS, **same_draw}
        prefilled = await self._legs.prefill(plan, seat, header, record, asked)
        if isinstance(prefilled, Response):
            return prefilled
        more = _fields(plan, may_fail_over)
        if prefilled is not None:
            first = first_token.begin(plan, reports, prefilled.answer)
            if first is not None:
                stream = stream_state.Stream(plan)
                begun = self._begun(plan, stream, reports, first, seat, prefilled, header, record)
                go_on = self._failover.of(plan, header, record, more)
                return self._relayed(begun, record, watcher=stream, go_on=go_on)
            more = {**more, **same_draw}
        opened = await self._legs.decode(plan, seat, prefilled, header, record, more)
        return self._decoded(plan, opened, header, record, may_fail_over)

    def _decoded(
        self, plan: RequestPlan, opened: Opened, header: bytes, record: Record, may_fail_over: bool
    ) -> Relayed:
        """Relay decode's answer; a stream may be continued by another engine."""
        if opened.status != 200 or not opened.is_events:
            return self._relayed(opened, record, style=plan.error_style)
        watcher = _watcher(plan, may_fail_over)
        go_on = self._failover.of(plan, header, record, _fields(plan, may_fail_over))
        return self._relayed(opened, record, watcher=watcher, go_on=go_on, style=plan.error_style)

    def _begun(
        self,
        plan: RequestPlan,
        stream: stream_state.Stream,
        reports: Mapping[str, str],
        first: bytes,
        seat: Seat,
        prefilled: Prefilled,
        header: bytes,
        record: Record,
    ) -> Begun:
        self._metrics.first_tokens.inc()

        async def decode() -> Opened:
            rest = plan.rest(stream.follows(reports))
            opened = await self._legs.decode(rest, seat, prefilled, header, record, prompt=plan)
            if opened.status != 200 or not opened.is_events:
                opened.close()
                raise ApiError(502, "the decode engine refused the stream that prefill began")
            return opened

        hold_s = self._first_token_hold.of(record.elapsed())
        return Begun(first, seat, decode, lambda: self._legs.give_back(prefilled), hold_s)

    async def forward(
        self, method: str, target: str, data: bytes, headers: Headers, record: Record
    ) -> Response | Relayed:
        """Pass any other request to a decode engine as it is, but without transfer params; to all
        engines, if it changes them.

        `target`: raw path and query. Raises `ApiError`.
        """
        if bodies.may_name_params(data):
            await bodies.check_elements(data, self._settings.limits.max_json_elements)
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
        plan = RequestPlan(target, {}, headers, record.key_name, self._estimates)
        if method == "POST":
            self._meter(plan, record)
        seat = await self._seat(plan, record)

        def call(engine: EngineEndpoint) -> Awaitable[aiohttp.ClientResponse]:
            # Taken as encoded: tidying `..` would lead to paths that the app has refused.
            url = URL(f"{engine.url}{target}", encoded=True)
            # A redirect could lead to a path that the caller may not use.
            headers = [*sent, *engine.headers.items()]
            answer = self.client.request(
                method, url, data=data or None, headers=headers, allow_redirects=False
            )
            return upstream.head(answer, limit, "decode")

        opened = await self._legs.decode_leg.open(call, seat, plan, record, attempts=1)
        return self._relayed(opened, record, counts=False)

    def engines_changed(self) -> None:
        """Admit waiting requests: an engine may have room for them now."""
        self._admission.admit_waiting()

    def running(self) -> dict[str, int]:
        """How much each engine is needed for; see `Legs.running`."""
        return self._legs.running()

    def share(self) -> None:
        """From now on keep what is new for `report`."""
        for memory in self._memories.values():
            memory.share()

    def report(self) -> bytes | None:
        """What other routers may know of the engines, and were not told yet; None if nothing."""
        urls = {engine.name: engine.url for engine in self._topology.engines}
        sent = [
            Sent(name, urls[engine], keys)
            for name, memory in self._memories.items()
            for engine, keys in memory.news()
            if engine in urls
        ]
        loads = self._in_flight.loads()
        return msgspec.json.encode(Report(loads, sent)) if loads or sent else None

    def hear(self, router: str, data: msgspec.Raw) -> None:
        """Another router's report. Engines that are not known here are left out. Raises
        msgspec.MsgspecError."""
        report = _REPORTS.decode(data)
        self._others.hear(router, report.loads)
        if not report.sent:
            return
        names = {engine.url: engine.name for engine in self._topology.engines}
        for sent in report.sent:
            memory = self._memories.get(sent.memory)
            if memory is not None and sent.engine in names:
                memory.note(sent.keys, names[sent.engine])
                self._metrics.heard.inc()

    def engine_gone(self, name: str) -> None:
        """Forget an engine that is neither up nor missing."""
        self._in_flight.forget(name)
        self._legs.invitations.forget(name)
        self._metrics.forget(name)

    async def close(self) -> None:
        """Wait for releases under way."""
        await self.adapters.close()
        await self._legs.close()

    def _may_fail_over(self) -> bool:
        # With one decode engine no other can continue a stream, so streams need no state.
        return self._settings.migration_limit > 0 and len(self._topology.of("decode")) > 1

    def _check_length(self, plan: RequestPlan) -> None:
        limit = self._settings.limits.max_prompt_tokens
        if limit is not None and plan.tokens > limit:
            raise ApiError(
                400,
                f"the prompt has about {plan.tokens} tokens, and {limit} are allowed "
                "(router.limits.max_prompt_tokens)",
            )

    def _prioritized(self, body: dict[str, Any], client: str | None) -> dict[str, Any]:
        """With the client's priority, if all engines schedule by it; others would refuse it."""
        if not self._settings.shares:
            return body
        engines = self._topology.engines
        if any(self._compatibility.said(one).get(SCHEDULING) != "priority" for one in engines):
            return body
        return bodies.with_priority(body, self._served.share(client).priority)

    def _meter(self, plan: RequestPlan, record: Record) -> None:
        """Count the request and its answer for the client's share. Raises `ApiError` 429."""
        if self._settings.shares:
            told = self._rate_limits.admit(plan.client, plan.tokens, plan.error_style)
            record.metering = Metering(told, lambda tokens: self._served_output(plan, tokens))

    def _served_output(self, plan: RequestPlan, tokens: int) -> None:
        self._served.charge(plan.client, tokens)
        self._rate_limits.answered(plan.client, tokens)

    async def _seat(self, plan: RequestPlan, record: Record) -> Seat:
        seat = await self._admission.seat("decode", plan)
        if seat is None:
            raise ApiError(503, f"no decode engine is up: {self._why_none()}", {"Retry-After": "5"})
        record.queued_s = record.elapsed()
        return seat

    def _why_none(self) -> str:
        down = self._topology.down.items()
        gone = [f"{name} {away.why}" for name, away in down if role_of(name) == "decode"]
        return ", ".join(gone) or "the router knows none"

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


def _fields(plan: RequestPlan, may_fail_over: bool) -> Mapping[str, Any]:
    """What decode's leg adds to the client's body."""
    if may_fail_over and plan.not_resumed is None:
        return _WITH_IDS
    return NOTHING_MORE


def _watcher(plan: RequestPlan, may_fail_over: bool) -> Watcher:
    """What follows the stream: with a state if another engine may continue or repeat it."""
    if may_fail_over and plan.not_resumed is None:
        return stream_state.Stream(plan)
    last = bodies.last_of_stream(plan.body, plan.path)
    if may_fail_over and plan.not_replayed is None:
        return Replay(plan.path, last)
    return Plain(paths.ENDS[plan.path], last)
