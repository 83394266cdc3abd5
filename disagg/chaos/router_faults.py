"""`disagg bench router-faults`: the router in front of engines that fail on purpose.

A real router process, with timeouts below a second, in front of fake engines that apply the faults
named in each request, in every combination of a prefill and a decode fault. A part of the streams
has comments, odd line ends or fields that vLLM does not write by default; a part of the requests
offers an upgrade of the protocol. Two models share the address, and two clients the engines. One
engine after the other leaves the router and comes back. Each request must end
right or with one well-formed error, in time. At the end no request may be in flight, no lease held,
no stack trace logged and no memory leaked, and plain requests must be served again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from disagg.bench.results import Output, Row, Target, target
from disagg.bench.results import Table as ResultTable
from disagg.chaos.answer_check import RIGHT, UNKNOWN, WRONG, Received, judge
from disagg.chaos.expected_answers import CHAT, MODELS, NO_MODEL, VOCABULARY
from disagg.chaos.faulty_engine import DECODE, MID_STREAM, PREFILL
from disagg.chaos.router_scene import CLIENTS, DEADLINE_S, ENGINES, Scene, key_of
from disagg.chaos.stream_forms import FORMS, USUAL
from disagg.config import Role
from disagg.router.server.background import background
from disagg.router.topology import name_in
from disagg.tables import show as show_table

RECOVERY_S, RECOVERED = 40.0, 16
_PER_ROUND = 2500
_RSS_MIB = 16.0
_UNKNOWN = 1 / 64  # of the requests name a model that there is not
_MILD = 15  # requests without a prefill fault, per request that may have one
_OFFERED = 1 / 8
_MOVE_S = 0.3  # between two changes of the engines
# As clients write them. Java's and curl's are sent with each first request that is not TLS.
_OFFERS = (
    {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQ"},
    {"connection": "keep-alive, Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"},
    {"connection": "Upgrade", "upgrade": "nothing-that-is/1.0"},
)


@dataclass(frozen=True)
class FaultCase:
    """One request and the fault of each leg (`reset/once`: at the first engine only)."""

    number: int
    prefill: str
    decode: str
    path: str
    body: dict[str, Any]
    form: str = USUAL
    """How the engines write a stream; see `stream_forms.py`."""
    client: str = next(iter(CLIENTS))
    offer: Mapping[str, str] = field(default_factory=dict)
    """The headers that offer an upgrade."""

    @property
    def kinds(self) -> tuple[str, str]:
        return self.prefill.partition("/")[0], self.decode.partition("/")[0]

    @property
    def refusing(self) -> tuple[int, int]:
        """How many engines of each role must refuse connections for this request."""
        how = {"refuse/once": ENGINES - 1, "refuse/always": ENGINES}
        return how.get(self.prefill, 0), how.get(self.decode, 0)


@dataclass
class FaultReport:
    """outcomes: by prefill and decode fault. problems: violations of the rules above."""

    outcomes: dict[tuple[str, str], Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    problems: list[str] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0
    begun_at_prefill: int = 0
    odd_streams: int = 0
    """Streams that the engines wrote in another form than vLLM's usual one."""
    offers: int = 0
    moves: int = 0
    by_client: Counter[str] = field(default_factory=Counter)

    def total(self) -> Counter[str]:
        return sum(self.outcomes.values(), Counter[str]())


def run(requests: int, clients: int, seed: int, first_token: Role, output: Output) -> int:
    """Run it and print. Returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    report = uvloop.run(storm(requests, clients, seed, first_token, console))
    for role in (0, 1):
        show_table(_table(report, role))
    for problem in report.problems[:20]:
        console.print(problem, markup=False)
    if len(report.problems) > 20:
        console.print(f"... and {len(report.problems) - 20} more")
    if report.begun_at_prefill:
        console.print(f"{report.begun_at_prefill} streams began with prefill's token")
    console.print(
        f"{dict(report.total())} of {len(report.outcomes)} combinations in {report.seconds:.0f} s, "
        f"the slowest {report.slowest_s:.1f} s; router {report.rss_mib[0]:.0f} to "
        f"{report.rss_mib[-1]:.0f} MiB; problems: {len(report.problems) or 'none'}"
    )
    command = "router-faults" if first_token == "decode" else f"router-faults-{first_token}"
    output.write(command, _as_json(report), [_result_table(report)], _targets(report))
    return 1 if report.problems else 0


def cases(requests: int, seed: int, first_token: Role = "decode") -> list[FaultCase]:
    """Every combination of faults, repeatedly, in random order.

    The router takes prefill engines that fail so often out of rotation most of the time. With
    `first_token` prefill, only one request of sixteen may have a prefill fault.
    """
    generator = random.Random(seed)
    all_pairs = list(itertools.product(PREFILL, DECODE))
    if first_token == "prefill":
        all_pairs += [("right", one) for one in DECODE] * (_MILD * len(PREFILL))
    pairs: list[tuple[str, str]] = []
    while len(pairs) < requests:
        pairs += generator.sample(all_pairs, len(all_pairs))
    return [_case(number, pair, generator) for number, pair in enumerate(pairs[:requests])]


def _case(number: int, kinds: tuple[str, str], generator: random.Random) -> FaultCase:
    path = generator.choice(["/v1/completions", "/v1/completions", CHAT])
    # The first token is unique, so that no answer passes for that of another prompt.
    prompt = [number % VOCABULARY, *(generator.randrange(VOCABULARY) for _ in range(20))]
    text = " ".join(map(str, prompt))
    model = generator.choice(MODELS) if generator.random() > _UNKNOWN else NO_MODEL
    body: dict[str, Any] = {"model": model, "max_tokens": generator.randrange(4, 12)}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = generator.choice([text, prompt])
    body["stream"] = generator.random() < 0.6
    if generator.random() < 0.25:
        body["stop"] = ["never said"]  # such a stream cannot be continued from its tokens
    if generator.random() < 0.5:
        body["temperature"] = 0  # it can be replayed
    if body["stream"] and generator.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    prefill, decode = (f"{kind}/{generator.choice(['once', 'always'])}" for kind in kinds)
    # Half of all streams have vLLM's usual form.
    form = generator.choice(list(FORMS)) if body["stream"] and number % 2 else USUAL
    offer = generator.choice(_OFFERS) if generator.random() < _OFFERED else {}
    client = generator.choice(list(CLIENTS))
    return FaultCase(number, prefill, decode, path, body, form, client, offer)


# ---- the requests --------------------------------------------------------------------------


async def storm(
    requests: int,
    clients: int,
    seed: int,
    first_token: Role = "decode",
    console: Console | None = None,
) -> FaultReport:
    """Send all requests, `clients` at a time. `first_token`: as in `router.pairing`."""
    report, began = FaultReport(), time.monotonic()
    plan = cases(requests, seed, first_token)
    async with AsyncExitStack() as stack:
        scene = await Scene.open(stack, first_token)
        report.rss_mib.append(scene.rss_mib())
        for at in range(0, len(plan), _PER_ROUND):
            chosen = plan[at : at + _PER_ROUND]
            for refusing in sorted({case.refusing for case in chosen}):
                await scene.refuse(refusing)
                batch = [case for case in chosen if case.refusing == refusing]
                async with _moving(scene, random.Random(seed + at)):
                    await _all(scene, batch, clients, report)
                report.problems += await scene.settled()
            await scene.refuse((0, 0))
            report.rss_mib.append(scene.rss_mib())
            if console is not None:
                console.print(f"{at + len(chosen)} of {requests}: {dict(report.total())}")
        report.problems += await _recovery(scene, requests) + await scene.settled()
        report.problems += scene.logged_traces()
        report.moves = scene.moves
        report.begun_at_prefill = round(await scene.figure("disagg_router_first_tokens_from"))
    # The first round fills caches and pools.
    if len(report.rss_mib) > 2 and report.rss_mib[-1] > report.rss_mib[1] + _RSS_MIB:
        report.problems.append(f"the router's memory grew, in MiB: {report.rss_mib}")
    report.seconds = time.monotonic() - began
    return report


@asynccontextmanager
async def _moving(scene: Scene, generator: random.Random) -> AsyncIterator[None]:
    """One engine of a role and model at a time is away, another one every `_MOVE_S`."""
    places = list(itertools.product(MODELS, get_args(Role), range(ENGINES)))

    async def move() -> None:
        while True:
            model, role, number = generator.choice(places)
            await scene.move([name_in(model, f"{role}-{number}")])
            await asyncio.sleep(_MOVE_S)

    try:
        async with background(move()):
            yield
    finally:
        await scene.move([])


async def _all(scene: Scene, batch: Sequence[FaultCase], clients: int, report: FaultReport) -> None:
    left = iter(batch)

    async def client() -> None:
        for case in left:
            began = time.monotonic()
            outcome = await ask(scene, case)
            report.slowest_s = max(report.slowest_s, time.monotonic() - began)
            if outcome.startswith(WRONG):
                what = f"{case.prefill} {case.decode} {case.path} {case.form}"
                report.problems.append(f"{what}: {outcome}")
                outcome = WRONG
            if outcome == RIGHT and case.body["stream"] and case.kinds[1] in MID_STREAM:
                outcome = "continued"
            report.outcomes[case.kinds][outcome] += 1
            report.odd_streams += case.form != USUAL
            report.offers += bool(case.offer)
            report.by_client[case.client] += outcome in (RIGHT, "continued")

    await asyncio.gather(*(client() for _ in range(clients)))


async def ask(scene: Scene, case: FaultCase) -> str:
    """The outcome of one request; see `answer_check.judge`."""
    headers = {
        "x-request-id": f"storm-{case.number}",
        "x-fault": f"prefill={case.prefill},decode={case.decode}",
        "x-form": case.form,
        "authorization": f"Bearer {key_of(case.client)}",
        **case.offer,
    }
    content, broken = bytearray(), False
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            scene.client.post(scene.url + case.path, json=case.body, headers=headers) as answer,
        ):
            try:
                async for chunk in answer.content.iter_any():
                    content += chunk
            except aiohttp.ClientError:
                broken = True
    except TimeoutError:
        return f"{WRONG}: no end within {DEADLINE_S:g} s, after {bytes(content[-300:])!r}"
    except aiohttp.ClientError as error:
        return f"{WRONG}: no answer: {error!r}"
    return judge(
        case.path, case.body, Received(answer.status, answer.content_type, bytes(content), broken)
    )


async def _recovery(scene: Scene, number: int) -> list[str]:
    """Plain requests must be served again."""
    deadline, in_a_row, outcome = time.monotonic() + RECOVERY_S, 0, ""
    generator = random.Random(number)
    while in_a_row < RECOVERED:
        if time.monotonic() > deadline:
            return [f"not recovered after {RECOVERY_S:g} s; last outcome: {outcome}"]
        number += 1
        outcome = await ask(scene, _case(number, ("right", "right"), generator))
        if outcome.startswith(WRONG):
            return [f"plain request: {outcome}"]
        in_a_row = in_a_row + 1 if outcome in (RIGHT, UNKNOWN) else 0
    return []


# ---- output --------------------------------------------------------------------------------


def _table(report: FaultReport, role: int) -> Table:
    """One row per fault of a role, over all faults of the other role."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for kinds, counts in report.outcomes.items():
        rows[kinds[role]] += counts
    columns = sorted(report.total())
    table = Table(title=f"By fault of the {('prefill', 'decode')[role]} engines")
    for column in ("fault", *columns):
        table.add_column(column, justify="right")
    for kind in (PREFILL, DECODE)[role]:
        table.add_row(kind, *(str(rows[kind][column] or "") for column in columns))
    return table


def _result_table(report: FaultReport) -> ResultTable:
    counts = report.total()
    rows: list[Row] = [{"outcome": name, "count": counts[name]} for name in sorted(counts)]
    rows += [
        {"outcome": "streams that began with prefill's token", "count": report.begun_at_prefill},
        {"outcome": "streams with comments, odd lines or fields", "count": report.odd_streams},
        {"outcome": "requests that offered an upgrade", "count": report.offers},
        {"outcome": "times that an engine left or came back", "count": report.moves},
        {"outcome": "slowest answer, s", "count": round(report.slowest_s, 1)},
        {"outcome": "router's memory at the start, MiB", "count": round(report.rss_mib[0])},
        {"outcome": "router's memory at the end, MiB", "count": round(report.rss_mib[-1])},
    ]
    kinds = len(report.outcomes)
    return ResultTable(f"{counts.total():,} requests, {kinds} combinations of faults", rows)


def _targets(report: FaultReport) -> list[Target | None]:
    return [
        target("wrong answers", report.total()[WRONG], at_most=0),
        target(
            "problems (wrong, late, still in flight, leases held)", len(report.problems), at_most=0
        ),
    ]


def _as_json(report: FaultReport) -> dict[str, Any]:
    combinations = [
        {"prefill": prefill, "decode": decode, **counts}
        for (prefill, decode), counts in sorted(report.outcomes.items())
    ]
    figures = {"seconds": report.seconds, "slowest_s": report.slowest_s, "rss_mib": report.rss_mib}
    return {**figures, "problems": report.problems, "combinations": combinations}
