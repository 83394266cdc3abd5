"""`disagg bench transfer`: whole fetches over every transport, their upper bounds, and NIXL.

Two processes of disagg, and two for each setting of NIXL. All live for the whole run. NIXL's are
stopped (SIGSTOP) while another way is measured, because their threads poll without end. Each
repeat measures every way in turn, so that drift of the machine affects all alike. The reference is
one thread's memcpy of the same bytes in one piece; on GPUs each way has a ceiling of its own. Block
ids are in random order, about half of them in runs of 8, drawn anew on both sides for each repeat.
The first fetch of each way in each case goes into wiped memory, is compared with the source byte
for byte, and does not count. Needs neither vLLM nor Ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from disagg.bench.results import Output
from disagg.bench.transfer import args, peers, ways
from disagg.bench.transfer import gpus as transfer_gpus
from disagg.bench.transfer.device import DeviceConsumer, DeviceProducer
from disagg.bench.transfer.gpus import GpuPlace, Places
from disagg.bench.transfer.ours import Consumer, Producer, Setup
from disagg.bench.transfer.plan import Ids, TransferPlan
from disagg.bench.transfer.report import Samples, rows, show, tables, targets
from disagg.bench.transfer.ways import READY_S, Pair, Way
from disagg.errors import ConfigError
from disagg.testing.child_process import Child, ChildError


class Ends(NamedTuple):
    """The classes of disagg's two processes, and where they run."""

    producer: type[Producer]
    consumer: type[Consumer]
    places: Places


def run(plan: TransferPlan, *, with_peer: bool, output: Output) -> int:
    """Measure and print. Returns 0 unless a transport of disagg failed or moved a wrong byte."""
    plan.check()
    if plan.device != "cpu":
        transfer_gpus.require()
    places = transfer_gpus.choose(plan.device)
    of_device = {"cpu": (Producer, Consumer), "cuda": (DeviceProducer, DeviceConsumer)}
    ends = Ends(*of_device[plan.device], places)
    return measure(plan, ends, with_peer=with_peer, output=output)


def measure(plan: TransferPlan, ends: Ends, *, with_peer: bool, output: Output) -> int:
    """As `run`, with a plan that was checked, between these ends."""
    console = Console(highlight=False, soft_wrap=True)
    if with_peer and (reason := peers.reason_against(plan, shared=ends.places.shared)):
        console.print(f"no peer: {reason}", markup=False)
        with_peer = False
    samples: Samples = defaultdict(list)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(_folder()))
        bench = _Bench(plan, ends, folder, stack)
        try:
            if with_peer:
                bench.start_peers(lambda text: console.print(text, markup=False))
            _measure(bench, plan, samples, console)
        except (KeyboardInterrupt, SystemExit):
            console.print(f"ended while {bench.doing}; so far:", markup=False)
            show(_report(bench, plan, samples, []), console)
            raise
        gpus = bench.leave()
    report = _report(bench, plan, samples, gpus)
    show(report, console)
    command = "transfer" if plan.device == "cpu" else f"transfer-{plan.device}"
    output.write(command, report, tables(report), targets(report))
    return int(any(way.problem and not way.is_peer for way in bench.ways))


def _report(bench: _Bench, plan: TransferPlan, samples: Samples, gpus: list[str]) -> dict[str, Any]:
    return {
        "device": plan.device,
        "gpus": gpus,
        "layers": plan.layers,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "notes": _notes(bench, plan),
        "problems": {way.name: way.problem for way in bench.ways if way.problem},
        "rows": rows(
            plan,
            samples,
            [way.name for way in bench.ways if way.is_peer],
            [way.name for way in bench.ways if way.is_tcp],
        ),
    }


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder for logs and files; removed after SIGTERM too, which ends the command as ^C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    try:
        with tempfile.TemporaryDirectory(None, "disagg-", place) as folder:
            yield folder
    finally:
        signal.signal(signal.SIGTERM, before)


def _notes(bench: _Bench, plan: TransferPlan) -> list[str]:
    notes = [
        f"{way.name}: with {min(plan.sizes)} MB only, because both ends make a call for each block "
        "and layer"
        for way in bench.ways
        if way.smallest_only and len(plan.sizes) > 1
    ]
    if plan.device != "cpu" and bench.shared:
        notes.append("both ends on one GPU: NCCL uses its network transport between them")
    return notes


class _Bench:
    """The processes, and the ways between them. doing: what is under way."""

    doing = "starting"

    def __init__(self, plan: TransferPlan, ends: Ends, folder: Path, stack: ExitStack) -> None:
        self._plan, self._folder, self._stack = plan, folder, stack
        self.shared = ends.places.shared
        self._pair = Pair(
            self._end("producer", ends.producer, ends.places.producer),
            self._end("consumer", ends.consumer, ends.places.consumer),
        )
        self.ours = ways.transports(self._pair, plan.transports)
        if plan.device == "cpu":
            beside = ways.on_host(self._pair)
        else:
            beside = ways.on_device(self._pair, shared=self.shared)
        self.ways = beside + self.ours
        self._beside = beside

    def start_peers(self, tell: Callable[[str], None]) -> None:
        """Start NIXL's processes, after disagg's have their memory."""
        self.doing = "starting NIXL"
        for child in self._pair:
            # A child that fails to start reports it in `prepare`.
            with contextlib.suppress(ChildError):
                child.call("ready", timeout_s=READY_S)
        self.ways += peers.start(self._plan, self._child, tell)

    def prepare(self, block_bytes: int) -> None:
        """Prepare every way for blocks of this size."""
        self.doing = "connecting"
        names = [way.name for way in self.ours]
        producer, consumer = self._pair
        try:
            endpoint, missing = producer.call("serve", names, block_bytes, timeout_s=READY_S)
            missing |= consumer.call("connect", names, block_bytes, endpoint, timeout_s=READY_S)
        except ChildError as error:
            # disagg needs both ends.
            missing = {way.name: str(error) for way in self._beside + self.ours}
        for way in self.ways:
            way.problem = way.problem or missing.get(way.name)
            if way.problem is None:
                way.guarded(partial(way.prepare, block_bytes))

    def leave(self) -> list[str]:
        """Close both ends; returns the names of their GPUs."""
        found = []
        for child in self._pair if self._plan.device != "cpu" else ():
            with contextlib.suppress(ChildError):
                name = child.call("describe")
                found += [name] if name not in found else []
        for child in self._pair:
            with contextlib.suppress(ChildError):
                child.call("leave")
        return found

    def _end(self, name: str, make: Callable[[Setup], Any], place: GpuPlace) -> Child:
        plan, files = self._plan, self._folder / "files"
        setup = Setup(
            plan.cache_bytes(), plan.layers, place.device, files, plan.staging_bytes, plan.checksum
        )
        return self._child(name, make, setup, env=place.env)

    def _child(self, name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Child:
        log = self._folder / f"{name.replace('/', '-')}.log"
        child = Child(name, make, *args, log=log, **kwargs)
        self._stack.callback(child.end)
        return child


def _measure(bench: _Bench, plan: TransferPlan, samples: Samples, console: Console) -> None:
    generator, prepared = np.random.default_rng(1), 0
    cases = plan.cases()
    steps = len(cases) * (plan.repeats + 1) * len(bench.ways)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=steps)
        for case in cases:
            if case.block_bytes != prepared:
                prepared = case.block_bytes
                bench.prepare(prepared)
            for way in bench.ways:
                samples[case, way.name] = []  # the order of the rows
            for number in range(plan.repeats + 1):
                here, there = (plan.ids(case, generator) for _ in range(2))
                turn = number % len(bench.ways)
                for way in bench.ways[turn:] + bench.ways[:turn]:
                    shown = f"{case.megabytes} MB x {case.fetches}, {case.block_bytes >> 10} KiB"
                    bench.doing = f"measuring {shown}: {way.name}"
                    progress.update(task, advance=1, description=f"{shown}: {way.name}")
                    if way.problem or (way.smallest_only and case.megabytes > min(plan.sizes)):
                        continue
                    seconds = way.guarded(partial(_once, way, here, there, number))
                    if number and seconds is not None:
                        samples[case, way.name].append(seconds)


def _once(way: Way, here: Ids, there: Ids, number: int) -> float:
    here, there = way.spread(here), way.spread(there)
    if number or way.check == "none":
        return way.move(here, there)
    way.reader.call("wipe")
    seconds = way.move(here, there)
    if way.check == "flat":
        wrong, what = way.reader.call("wrong_pages", here), "pages"
    else:
        wrong, what = way.reader.call("wrong_blocks", here, there), "blocks"
    if wrong:
        raise ChildError(f"WRONG DATA in {wrong} {what}")
    return seconds


def main() -> None:
    """The entry of `python -m disagg.bench.transfer`. Exits with the status of `run`."""
    try:
        plan, with_peer, output = args.parse(sys.argv[1:])
        sys.exit(run(plan, with_peer=with_peer, output=output))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
