"""`disagg bench transfer`: whole fetches over every transport, beside a memcpy and NIXL.

Two processes of ours, two for each setting of the peer. All live for the whole time, the peer's
stopped (SIGSTOP) while another way is measured, since its threads poll without end. Each
repetition visits every way in turn, so that drift of the machine falls on all alike. The
reference is one thread's flat memcpy of the same bytes. Block ids are in random order, about
half of them in runs of 8, drawn anew on both sides for each repetition. The first fetch of each
way in each case goes into wiped memory, is compared with the source byte for byte, and is not
counted. Needs neither vLLM nor Ray.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from disagg.bench import nixl_peer
from disagg.bench.children import Child, ChildError
from disagg.bench.transfer_ours import Consumer, Producer
from disagg.bench.transfer_plan import Ids, Plan
from disagg.bench.transfer_report import FLAT, IN_PIECES, Samples, rows, show

_READY_S = 120.0
_FETCH_S = 45.0


@dataclass
class Way:
    """How to measure one way: prepare for a block size, move, wipe and check."""

    name: str
    move: Callable[[Ids, Ids], float]
    reader: Child
    prepare: Callable[[int], None] = field(default=lambda _: None)
    is_peer: bool = False
    is_tcp: bool = False
    problem: str | None = None
    processes: tuple[Child, ...] = ()  # those to stop while another way is measured

    def pause(self) -> None:
        """Off the processor."""
        for child in self.processes:
            child.pause()

    def resume(self) -> None:
        """Back on it."""
        for child in self.processes:
            child.resume()


def run(plan: Plan, *, with_peer: bool, json_path: Path | None) -> int:
    """Measure and print. 0 unless one of our transports failed or moved a wrong byte."""
    plan.check()
    console = Console(highlight=False, soft_wrap=True)
    if with_peer and not nixl_peer.installed():
        console.print(f"no peer: NIXL is not installed; {nixl_peer.INSTALL}", markup=False)
        with_peer = False
    samples: Samples = defaultdict(list)
    # As ^C does: children are ended and files removed on the way out.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        place = "/dev/shm" if os.path.isdir("/dev/shm") else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(None, "disagg-", place)))
        bench = _Bench(plan, folder, stack, console)
        bench.start_ours()
        if with_peer:
            bench.start_peer()
        _measure(bench, plan, samples, console)
    peers = [way.name for way in bench.ways if way.is_peer]
    over_tcp = [way.name for way in bench.ways if way.is_tcp]
    report = {
        "device": plan.device,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "problems": {way.name: way.problem for way in bench.ways if way.problem},
        "rows": rows(plan, samples, peers, over_tcp),
    }
    show(report, console)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2))
    return int(any(way.problem and not way.is_peer for way in bench.ways))


class _Bench:
    """The processes, and the ways there are between them."""

    def __init__(self, plan: Plan, folder: Path, stack: ExitStack, console: Console) -> None:
        self._plan, self._folder, self._stack, self._console = plan, folder, stack, console
        self.ways: list[Way] = []
        self._leases = self._pairs = 0

    def start_ours(self) -> None:
        """Our producer and consumer, and the memcpys in the latter."""
        files = self._folder / "files"
        args = (self._plan.cache_bytes(), self._plan.device, files)
        producer = self._child("producer", Producer, *args)
        consumer = self._child("consumer", Consumer, *args)
        for name, kind in ((FLAT, "flat"), (IN_PIECES, "pieces")):
            self.ways.append(Way(name, _memcpy(consumer, kind), consumer))
        ours = [Way(t, self._fetch(producer, consumer, t), consumer) for t in self._plan.transports]

        def prepare(block_bytes: int) -> None:
            names = [way.name for way in ours]
            endpoint, missing = producer.call("serve", names, block_bytes, timeout_s=_READY_S)
            missing |= consumer.call("connect", names, block_bytes, endpoint, timeout_s=_READY_S)
            for way in ours:
                way.problem = way.problem or missing.get(way.name)

        self.ways[0].prepare = prepare
        self.ways += ours

    def start_peer(self) -> None:
        """A pair of processes for each of the peer's settings, stopped while others move."""
        # Progress threads take whole cores even when idle, so these pairs start last.
        settings = nixl_peer.SETTINGS[self._plan.device]
        for progress in (False, True):
            chosen = [setting for setting in settings if setting.progress == progress]
            for some in [[setting] for setting in chosen] if progress else [chosen]:
                for setting, pair in [(setting, self._pair(setting)) for setting in some]:
                    self._meet(setting, *pair)

    def _pair(self, setting: nixl_peer.Setting) -> tuple[Child, Child]:
        number = self._pairs = self._pairs + 1
        env = {"UCX_TLS": setting.tls, "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
        args = (setting, self._plan.cache_bytes(), self._plan.device)
        return (
            self._child(f"nixl-out-{number}", nixl_peer.NixlProducer, *args, env=env),
            self._child(f"nixl-in-{number}", nixl_peer.NixlConsumer, *args, env=env),
        )

    def _meet(self, setting: nixl_peer.Setting, producer: Child, consumer: Child) -> None:
        try:
            met = producer.call("metadata", timeout_s=_READY_S)
            consumer.call("connect", *met, timeout_s=_READY_S)
        except ChildError as error:
            self._console.print(f"{setting.label}: does not start here: {error}", markup=False)
            producer.end()
            consumer.end()
            return
        way = Way(setting.label, self._read(producer, consumer), consumer, is_peer=True)
        way.is_tcp, way.prepare = setting.is_tcp, partial(_prepare_read, consumer)
        way.processes = producer, consumer
        way.pause()
        self.ways.append(way)

    def _child(self, name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Child:
        child = Child(name, make, *args, log=self._folder / f"{name}.log", **kwargs)
        self._stack.callback(child.end)
        return child

    def _fetch(self, producer: Child, consumer: Child, name: str) -> Callable[[Ids, Ids], float]:
        def move(here: Ids, there: Ids) -> float:
            first, self._leases = self._leases, self._leases + len(there)
            producer.call("grant", first, there)
            return float(consumer.call("fetch", name, first, here, timeout_s=_FETCH_S))

        return move

    def _read(self, producer: Child, consumer: Child) -> Callable[[Ids, Ids], float]:
        def move(here: Ids, there: Ids) -> float:
            self._leases += 1
            notification = f"read-{self._leases}".encode()
            producer.start_call("attend", notification, len(here))
            seconds = float(consumer.call("read", notification, here, there, timeout_s=_FETCH_S))
            producer.result(_FETCH_S)
            return seconds

        return move


def _memcpy(consumer: Child, kind: str) -> Callable[[Ids, Ids], float]:
    return lambda here, there: float(consumer.call("memcpy", kind, here, there))


def _prepare_read(consumer: Child, block_bytes: int) -> None:
    consumer.call("prepare", block_bytes)


def _measure(bench: _Bench, plan: Plan, samples: Samples, console: Console) -> None:
    generator, prepared = np.random.default_rng(1), 0
    cases = plan.cases()
    steps = len(cases) * (plan.repeats + 1) * len(bench.ways)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        for case in cases:
            if case.block_bytes != prepared:
                prepared = case.block_bytes
                for way in bench.ways:
                    _guarded(way, partial(way.prepare, prepared))
            for way in bench.ways:
                samples[case, way.name] = []  # the order of the rows
            for number in range(plan.repeats + 1):
                here, there = (plan.ids(case, generator) for _ in range(2))
                turn = number % len(bench.ways)
                for way in bench.ways[turn:] + bench.ways[:turn]:
                    shown = f"{case.megabytes} MB x {case.fetches}, {case.block_bytes >> 10} KiB"
                    progress.update(task, advance=1, description=f"{shown}: {way.name}")
                    if way.problem is None:
                        seconds = _guarded(way, partial(_once, way, here, there, number))
                        if number and seconds is not None:
                            samples[case, way.name].append(seconds)


def _once(way: Way, here: Ids, there: Ids, number: int) -> float:
    if number or way.name == FLAT:  # it copies flat, so nothing lies where the ids say
        return way.move(here, there)
    way.reader.call("wipe")
    seconds = way.move(here, there)
    wrong = way.reader.call("wrong_blocks", here, there)
    if wrong:
        raise ChildError(f"WRONG DATA in {wrong} blocks")
    return seconds


def _guarded(way: Way, step: Callable[[], Any]) -> Any:
    """A way that failed once is left out from then on, and its error is shown."""
    way.resume()
    try:
        return step()
    except ChildError as error:
        way.problem = str(error)
        return None
    finally:
        way.pause()


if __name__ == "__main__":
    from disagg.bench.cli import app

    app(["transfer", *sys.argv[1:]], prog_name="python -m disagg.bench.transfer")
