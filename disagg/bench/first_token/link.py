"""`disagg bench handoff --link`: the first token of a handoff over a slow network.

The prefill engine computes a prompt in steps. Each engine is on a network of its own, and a link
between the two carries the KV cache at a given rate. The bench reaches both by loopback, which is
not slowed. The ways, each with a fresh prompt in every repeat:

- prefill alone: a plain request to the prefill engine, without a handoff, before each handoff.
- serial: the prefill leg, then the decode leg, which fetches the KV cache.
- streamed: both legs at once; decode fetches each step's KV while the next one is computed. Peers
  have no such way.
- beside: a plain request to the prefill engine while plain sockets carry as many bytes over the
  link. What the link alone takes from prefill, where both are on the same cores.

The time of a way runs from the prefill request to decode's first token. With `--link auto` the
transfer takes as long as the prefill alone just before, so `serial` takes at best twice that time,
and `streamed` one step's share more than it. Two engines run at a time. A handoff of which the link
did not carry the bytes ends the measurement of its connector.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from disagg.bench.first_token import link_report as report
from disagg.bench.first_token.link_engines import BLOCK, Engines, running
from disagg.bench.first_token.link_report import Missing, Sample, steps_text
from disagg.bench.first_token.pairs import SHOWN, SOCKETS, Pair, example, nixl, ours, random_prompt
from disagg.bench.results import Output
from disagg.errors import ConfigError, StartupError
from disagg.tables import show as show_table
from disagg.testing.checkpoint import make_model
from disagg.testing.network import Link, bits_per_s
from disagg.transport.names import TransportName

AUTO = "auto"
STEPS, TOKENS = (4, 16), 4096
MODEL = Path(".cache/models/kv32k-float32-hidden512")
# One core computes some 1,500 tokens per second of it.
_LAYERS, _HIDDEN, _KV_HEADS, _HEAD_DIM = 4, 512, 8, 128
_KV_BYTES_PER_TOKEN = 2 * _LAYERS * _KV_HEADS * _HEAD_DIM * 4  # float32
_MOST_TOKENS = 16384 - BLOCK
# The connector gives up a load after 30 s.
_MOST_TRANSFER_S = 20.0
_BARELY = 300  # tokens, of the first prompts
_NO_STREAM = "streamed, since its answers hold no disagg_invitation"
_NO_NETWORK = "it hands over through a folder, and a network file system is not part of this bench"
_AN_ERROR = re.compile(r"\b\w*(?:Error|Exception): .+")


@dataclass(frozen=True)
class LinkPlan:
    """What to measure. rate: of the link in bits per second; None: as fast as prefill. Raises
    ConfigError for what makes no sense."""

    tokens: int
    steps: Sequence[int]
    repeats: int
    rate: int | None
    transport: TransportName
    peers: Sequence[str]
    storage: Path

    def __post_init__(self) -> None:
        problems = []
        if not BLOCK <= self.tokens <= _MOST_TOKENS:
            problems.append(f"--lengths: {self.tokens} — {BLOCK} to {_MOST_TOKENS} tokens")
        problems += [
            f"--steps: {count} — {self.tokens} tokens in {count} steps are not whole blocks of "
            f"{BLOCK} in each"
            for count in self.steps
            if count < 1 or self.tokens % (count * BLOCK)
        ]
        unknown = [name for name in self.peers if name not in _PEERS]
        problems += [f"--peers: {name} — one of {', '.join(_PEERS)}" for name in unknown]
        if self.rate and (seconds := self.bytes * 8 / self.rate) > _MOST_TRANSFER_S:
            problems.append(
                f"--link: {self.tokens} tokens would take {seconds:.0f} s; at most "
                f"{_MOST_TRANSFER_S:.0f} s"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def paced(self) -> bool:
        """Whether there is a link, which only tcp crosses."""
        return self.transport == "tcp"

    @property
    def bytes(self) -> int:
        """Of a prompt's KV cache."""
        return self.tokens * _KV_BYTES_PER_TOKEN


def plan(
    link: str | None,
    steps: Sequence[int],
    lengths: Sequence[int],
    repeats: int,
    *,
    transport: TransportName | None,
    peers: Sequence[str],
    storage: Path,
) -> LinkPlan:
    """Of the command's options. Raises ConfigError."""
    transport = transport or "tcp"
    if link and transport != "tcp":
        raise ConfigError(f"--link: {transport} does not cross it; leave --link or --transport out")
    if len(lengths) > 1:
        raise ConfigError("--lengths: one length with --link or --steps")
    try:
        rate = None if link in (None, AUTO) else bits_per_s(str(link))
    except ConfigError as error:
        raise ConfigError(f"--link: {error}, and not {AUTO}") from error
    tokens = lengths[0] if lengths else TOKENS
    return LinkPlan(tokens, steps or STEPS, repeats, rate, transport, peers, storage)


_PEERS: dict[str, Callable[[Path], Pair]] = {
    "example": example,
    "nixl": lambda folder: nixl("cpu", "tcp,self"),
    "nixl-push": lambda folder: nixl("cpu", "tcp,self", push=True),
}


def run(plan: LinkPlan, output: Output) -> int:
    """Measure and print. Returns the exit status: 1 if an answer was wrong."""
    console = Console(highlight=False, soft_wrap=True)
    make_model(MODEL, layers=_LAYERS, hidden=_HIDDEN, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM)
    with ExitStack() as stack:
        link = stack.enter_context(Link()) if plan.paced else None
        own = tempfile.TemporaryDirectory(prefix="disagg-bench-", dir=plan.storage)
        bench = Bench(plan, link, Path(stack.enter_context(own)), console)
        bench.measure()
    auto = plan.paced and plan.rate is None
    rows = report.rows(bench.samples, plan.bytes, auto=auto)
    handoffs = [sample for sample in bench.samples if sample.connector != SOCKETS]
    wrong = sum(not sample.right for sample in handoffs)
    way = "a slow link" if plan.paced else plan.transport
    title = f"First token of {plan.tokens:,} tokens ({plan.bytes / 1e6:.0f} MB) over {way}, medians"
    show_table(report.table(rows, title), keys=3)
    for one in bench.missing:
        console.print(str(one), markup=False)
    console.print(f"{len(handoffs)} answers, {wrong} with other tokens than prefill's own")
    output.write(
        "handoff-link" if plan.paced else f"handoff-steps-{plan.transport}",
        {
            "rows": rows,
            "samples": [asdict(sample) for sample in bench.samples],
            "missing": [asdict(one) for one in bench.missing],
        },
        report.tables(rows, title, bench.missing),
        report.targets(rows, wrong, paced=plan.paced),
    )
    return 1 if wrong else 0


class Bench:
    """One run: engines come and go, and samples are collected."""

    def __init__(self, plan: LinkPlan, link: Link | None, folder: Path, console: Console) -> None:
        self.plan, self.link, self.folder, self.console = plan, link, folder, console
        self.samples: list[Sample] = []
        self.missing: list[Missing] = []
        self._generator = random.Random(1)

    def measure(self) -> None:
        """Every connector with every number of steps, one pair of engines after the other."""
        peers = {name: _PEERS[name](self.folder) for name in self.plan.peers}
        for steps in self.plan.steps:
            self._one(ours(self.plan.transport, self.folder), steps)
            for pair in peers.values():
                if pair.hands_params:
                    self._peer(pair, steps)
        for pair in peers.values():
            if not pair.hands_params:
                self._through_a_folder(pair)

    def _through_a_folder(self, pair: Pair) -> None:
        if self.link is not None:
            self._miss(Missing(pair.name, _NO_NETWORK))
        else:
            # It stores only a part of a prompt that is computed in steps, and its reader dies.
            self._peer(pair, 1)

    def _peer(self, pair: Pair, steps: int) -> None:
        """A peer that does not run here costs no other's figures."""
        try:
            self._one(pair, steps)
        except StartupError as error:
            self._miss(Missing(pair.name, cause(error), steps))
            self.console.print(error.log_tail, markup=False)

    def _miss(self, missing: Missing) -> None:
        self.missing.append(missing)
        self.console.print(str(missing), markup=False)

    def _one(self, pair: Pair, steps: int) -> None:
        label = _label(pair, steps)
        args = ("--max-num-batched-tokens", str(self.plan.tokens // steps), "--max-num-seqs", "16")
        began = time.monotonic()
        self.console.print(f"{label}: starting its two engines")
        with running(pair, MODEL, args, self.link) as engines:
            self.console.print(f"{label}: ready after {time.monotonic() - began:.0f} s")
            for length in (_BARELY, self.plan.tokens):  # first passes and handoffs include set-up
                engines.alone(self._prompt(length))
                engines.serial(self._prompt(length))
            if pair.name == "ours" and engines.invitation is None:
                self._miss(Missing(pair.name, _NO_STREAM, steps))
            for number in range(self.plan.repeats + 1):
                taken = self._round(engines, steps)
                if number:  # the first round warms the link
                    self.samples += taken
                shown = ", ".join(str(sample) for sample in taken)
                self.console.print(f"{label}, {number}/{self.plan.repeats}: {shown}")

    def _paced(self, pair: Pair, alone_s: float) -> int | None:
        """Give the link its rate for the next handoff, as fast as prefill was just before."""
        if self.link is None or not pair.hands_params:
            return None
        rate = self.plan.rate or round(self.plan.bytes * 8 / min(alone_s, _MOST_TRANSFER_S))
        self.link.pace(rate)
        return rate

    def _round(self, engines: Engines, steps: int) -> list[Sample]:
        """Each way once, with its answer compared with that of the prefill engine."""
        name = engines.pair.name
        ways = {"serial": engines.serial}
        if engines.invitation is not None:
            ways["streamed"] = engines.streamed
        taken = []
        for way, hand in ways.items():
            alone = engines.alone(self._prompt(self.plan.tokens))  # each time: machines drift
            rate = self._paced(engines.pair, alone)
            prompt = self._prompt(self.plan.tokens)
            before = 0 if self.link is None else self.link.sent(0)
            got = hand(prompt)
            self._require_crossed(name, before)
            right = got.tokens == engines.computed(prompt, len(got.tokens))
            taken.append(Sample(name, way, steps, alone, got.first_s, got.prefilled_s, right, rate))
        if self.link is not None and name == "ours":
            alone = engines.alone(self._prompt(self.plan.tokens))
            rate = self._paced(engines.pair, alone)
            beside = engines.beside(self._prompt(self.plan.tokens), self.link, self.plan.bytes)
            taken.append(Sample(SOCKETS, "beside", steps, alone, beside, beside, True, rate))
        engines.require_no_failure()
        for file in (self.folder / "example").glob("*/*"):
            file.unlink()  # ExampleConnector never removes its files, and /dev/shm is memory
        return taken

    def _require_crossed(self, connector: str, before: int) -> None:
        """Bytes that took another way were not paced. before: `Link.sent` before the handoff."""
        if self.link is None:
            return
        # Decode may compute the last block itself.
        least = self.plan.bytes - BLOCK * _KV_BYTES_PER_TOKEN
        if (crossed := self.link.sent(0) - before) < least:
            mb = f"{crossed / 1e6:.1f} of {self.plan.bytes / 1e6:.1f} MB"
            raise StartupError(f"only {mb} of {SHOWN[connector]}'s handoff crossed the link")

    def _prompt(self, length: int) -> list[int]:
        return random_prompt(self._generator, length)


def cause(error: StartupError) -> str:
    """What failed, in one line, with the last error in its log."""
    found = _AN_ERROR.findall(error.log_tail)
    return f"{error}; {found[-1]}" if found else str(error)


def _label(pair: Pair, steps: int) -> str:
    return f"{SHOWN[pair.name]}, {steps_text(steps)}"
