"""Pairs of workers in two processes, over every transport and kind of memory there is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transport.caches import PLAIN, Shape
from transport.host_device import COMPILER
from transport.pairs import MakePair, Pair, Start
from transport.worker import ASKED, Remote, Setup, Worker

from disagg.transport.names import TransportName
from disagg.transport.nixl.settings import is_installed

# Transport -> the kinds of memory that it moves; emulated: host memory in the place of a GPU's;
# ASKED: of leases that are not posted, so that the producer is asked each time.
KINDS: dict[TransportName, tuple[str, ...]] = {
    "cuda_ipc": ("cuda", "emulated", "emulated" + ASKED),
    "nccl": ("cuda", "emulated"),
    "nixl": ("cpu", "cpu" + ASKED, "cuda"),
    "process_memory": ("cpu", "cpu" + ASKED),
    "tcp": ("cpu", "cuda", "emulated"),
    "shared_storage": ("cpu", "cuda", "emulated"),
}
Way = tuple[TransportName, str]
# Of these only what lies before the wire differs, which `test_staged.py` tries each time; of the
# last, what differs between others that are tried.
LATER: set[Way] = {
    ("tcp", "emulated"),
    ("shared_storage", "emulated"),
    ("cuda_ipc", "emulated" + ASKED),
    ("nixl", "cpu" + ASKED),
}
WAYS = [
    pytest.param(way, id="-".join(way), marks=[pytest.mark.slow] if way in LATER else [])
    for way in ((name, kind) for name, kinds in KINDS.items() for kind in kinds)
]


# Of these `make test` has one case of each test: what differs between cases is of the parts that
# they share with other ways.
SAMPLED: set[Way] = {
    ("nccl", "emulated"),
    ("nixl", "cpu"),
    ("process_memory", "cpu" + ASKED),
    ("shared_storage", "cpu"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The stand-in is no matter of speed, and large amounts take long with it."""
    seen = set[tuple[str, str, Way]]()
    for item in items:
        if "emulated" in item.name and "256MiB" in item.name:
            item.add_marker(pytest.mark.slow)
        cases = getattr(item, "callspec", None)
        way = cases.params.get("way") if cases else None
        if way in SAMPLED:
            case = str(item.path), item.name.partition("[")[0], way
            if case in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(case)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    if chosen[1] == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if chosen[0] == "nixl" and not is_installed():
        pytest.skip("NIXL is not installed")
    if chosen[1].startswith("emulated") and COMPILER is None:
        pytest.skip("needs g++ to run the kernel on the host")
    return chosen


@pytest.fixture
def start(way: Way, tmp_path: Path) -> Iterator[Start]:
    """Starts workers of the transport under test, `remote` or here; ends them afterwards, and
    looks whether anything was left behind."""
    started: list[Remote | Worker] = []
    seeds = iter(range(1, 1000))
    folder = tmp_path / "storage"
    folder.mkdir(mode=0o700)

    def start(shape: Shape, *, remote: bool, empty: bool, **more: object) -> Remote | Worker:
        seed = None if empty else next(seeds)
        setup = Setup(way[0], way[1], shape, seed, folder, **more)  # type: ignore[arg-type]
        worker = Remote(setup) if remote else Worker(setup)
        started.append(worker)
        return worker

    yield start
    killed = False
    for worker in started:
        killed |= isinstance(worker, Remote) and not worker.is_alive()
        worker.close()
    assert killed or os.listdir(folder) == []


@pytest.fixture
def make_pair(start: Start) -> Iterator[MakePair]:
    made: list[Pair] = []

    def make(shape: Shape = PLAIN, target: Shape | None = None, use_limit_s: float = 20) -> Pair:
        producer = start(shape, remote=True, empty=False, use_limit_s=use_limit_s)
        consumer = start(target or shape, remote=False, empty=True)
        assert isinstance(producer, Remote)
        assert isinstance(consumer, Worker)
        made.append(Pair(producer, consumer, shape))
        return made[-1]

    yield make
    for one in made:
        if one.producer.is_alive():
            one.producer.signal(signal.SIGCONT)
            assert one.nothing_held(), "leases are still held"
