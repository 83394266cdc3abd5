"""One worker of either role: in this process, or driven over a pipe in one of its own.

Every wait has a deadline. It must never mock what it drives: control server, leases and
transports are the real ones, and faults are signals sent to real processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from transport import caches, host_device

from disagg.private_files import PrivateFolder
from disagg.transport import fetch as handoff
from disagg.transport import protocol as p
from disagg.transport.base import FetchJob, LeaseEntry, ReadableCache, Receiver, RemoteCache
from disagg.transport.blocks import BlockCache, Selection
from disagg.transport.control.client import Endpoint, Peers
from disagg.transport.control.lease import LeaseTable
from disagg.transport.control.server import ControlServer
from disagg.transport.deadline import Deadline
from disagg.transport.device.staging import Staging, open_staging
from disagg.transport.names import TransportName
from disagg.transport.nixl.settings import NixlSettings
from disagg.transport.registry import Means, make_receivers, make_senders
from disagg.transport.shared_storage import Storage

ASKED = "-asked"
FINGERPRINT = {"model": "tiny"}
SECRET = b"correct horse"

# Processes come from one that has imported torch already, so that each costs no seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "numpy.random",
        "disagg.transport.control.server",
        "disagg.transport.fetch",
        "disagg.transport.nccl.nccl",
        "disagg.transport.nixl.nixl",
        "disagg.transport.one_sided.cuda_ipc",
        "disagg.transport.one_sided.process_memory",
        "disagg.transport.shared_storage",
        "disagg.transport.tcp.tcp",
    ]
)


@dataclass(frozen=True)
class Setup:
    """A worker to be. `seed` None: a cache of poison, for a consumer."""

    transport: TransportName
    device: str
    shape: caches.Shape
    seed: int | None
    folder: Path
    use_limit_s: float = 20.0
    secret: bytes = SECRET
    staging_bytes: int = 64 << 20
    also: tuple[TransportName, ...] = ()
    port: int = 0
    nixl: NixlSettings = field(default_factory=NixlSettings)


@dataclass
class Act:
    """A signal to a process, once the fetch has come to a certain point. `done`: when it was."""

    signal: signal.Signals
    pid: int = field(default_factory=os.getpid)
    done: float = 0.0

    def __call__(self) -> None:
        os.kill(self.pid, self.signal)
        # Signals take effect on every thread only some time later.
        if self.signal == signal.SIGKILL:
            wait_until(lambda: not is_running(self.pid), 5)
        elif self.signal == signal.SIGSTOP and self.pid != os.getpid():
            wait_until(lambda: is_stopped(self.pid), 5)
        self.done = time.monotonic()


@dataclass(frozen=True)
class Order:
    """One fetch. `before` and `after` are sent around `RemoteCache.receive`, in its own thread;
    to this very worker if they are bare signals."""

    endpoint: Endpoint
    lease: int
    part: p.Part
    mine: Selection
    seconds: float = 10.0
    readers: int = 1
    before: Act | signal.Signals | None = None
    after: Act | signal.Signals | None = None


class Worker:
    """A worker's cache with both ends of one transport, its control server, and an owner of the
    blocks that frees them like vLLM: what `grant` was told to scribble over has other content
    within milliseconds of the lease's end."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        if setup.device == "cuda":
            # NCCL refuses two ranks on one GPU unless it takes their processes for two hosts.
            os.environ |= {"NCCL_HOSTID": f"test-{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo"}
        self.cache, self.staging = _cache(setup)
        self.layers = tuple(region.name for region in self.cache.regions)
        storage = Storage(PrivateFolder(setup.folder), 4 << 30)
        self.leases = LeaseTable(setup.use_limit_s)
        board = None if setup.device.endswith(ASKED) else self.leases.board
        means = Means("127.0.0.1", SECRET, storage, self.staging, board, setup.nixl)
        names = (setup.transport, *setup.also)
        self.senders = make_senders(names, self.cache, means)
        self.receivers = make_receivers(names, self.cache, means)
        self.receiver = self.receivers[0]
        self._interruptible = [_Interruptible(receiver) for receiver in self.receivers]
        generation = os.urandom(8).hex()
        self.server = ControlServer(
            host="127.0.0.1",
            port=setup.port,
            secret=SECRET,
            hello=p.Welcome(
                "engine", generation, {one.name: one.offer() for one in self.senders}, self.layers
            ),
            fingerprint=FINGERPRINT,
            cache=self.cache,
            leases=self.leases,
            senders=self.senders,
            use_limit_s=setup.use_limit_s,
        )
        self.endpoint = Endpoint("127.0.0.1", self.server.port, generation)
        self.peers = Peers("engine", FINGERPRINT, setup.secret)
        self._scribbled: dict[str, Sequence[int]] = {}
        self._outcomes: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._freeing = threading.Thread(target=self._free, daemon=True)
        self._freeing.start()

    def grant(
        self, lease: int, block_ids: Sequence[int], seconds: float = 30, scribble: bool = False
    ) -> None:
        if scribble:
            self._scribbled[str(lease)] = block_ids
        self.leases.grant(lease, str(lease), block_ids, seconds)

    def fetch(self, order: Order) -> handoff.Moved:
        with self.fetched(order) as moved:
            return moved

    def fetched(self, order: Order) -> contextlib.AbstractContextManager[handoff.Moved]:
        layers = self.layers[slice(*(order.mine.regions or (None,)))]
        request = handoff.FetchRequest(
            order.endpoint, order.lease, order.part, layers, order.readers
        )
        job = FetchJob(order.mine, Deadline.after(order.seconds))
        for receiver in self._interruptible:
            receiver.acts[id(job)] = _act(order.before), _act(order.after)
        return handoff.fetched(self.peers, request, job, self._interruptible)

    def log_to(self, path: Path) -> None:
        """Write this process's log to a file."""
        logging.basicConfig(filename=path, level=logging.INFO, force=True)

    def connections(self) -> int:
        """How many consumers have open."""
        return self.server.connections()

    def churn(self, seconds: float, block_ids: Sequence[int], stop: Path) -> int:
        """Lease after lease of the same blocks, which hold its number, and other bytes the moment
        that it ends, until there is such a file. Returns how many there were."""
        end, lease = time.monotonic() + seconds, 0
        while time.monotonic() < end and not stop.exists():
            caches.fill(self.cache, block_ids, lease % caches.SCRIBBLE)
            self.leases.grant(lease, str(lease), block_ids, 30)
            until = time.monotonic() + random.choice([0, 0.0001, 0.0003, 0.001])
            while time.monotonic() < until:
                pass
            self.leases.release(lease, "fetched")
            while self.leases.held():
                with self._lock:
                    self.leases.take_ended()
            caches.fill(self.cache, block_ids, caches.SCRIBBLE)
            lease += 1
        return lease

    def prompts(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        return caches.prompts(self.cache, block_ids)

    def digest(self) -> str:
        """Of all bytes of the cache."""
        found = hashlib.sha256()
        for region in self.cache.regions:
            found.update(region.memory.cpu().numpy().tobytes())
        return found.hexdigest()

    def taken(self) -> dict[str, int]:
        """How much of what is limited is taken."""
        hazards = self.leases.board.hazards
        assert hazards is not None
        return {
            "leases": self.held(),
            "slots": -len(hazards._free),
            "connections": self.connections(),
            "fetches": sum(len(getattr(one, "_fetches", ())) for one in self.senders),
            "files": sum(len(getattr(one, "_live", ())) for one in self.senders),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def held(self) -> int:
        """How many leases keep blocks that were not given back and scribbled over yet."""
        with self._lock:
            return self.leases.held()

    def outcome(self, lease: int) -> str | None:
        """fetched, aborted or expired; None while blocks are kept."""
        return self._outcomes.get(str(lease))

    def close(self) -> None:
        self.peers.close()
        for receiver in self.receivers:
            receiver.close()
        self.server.close()
        for sender in self.senders:
            sender.close()
        if self.staging is not None:
            self.staging.close()
        self._closed.set()
        self._freeing.join(5)
        self.leases.check_integrity()

    def _free(self) -> None:
        while not self._closed.wait(0.002):
            with self._lock:
                for ended in self.leases.take_ended():
                    blocks = self._scribbled.pop(ended.request_id, None)
                    if blocks is not None:
                        caches.fill(self.cache, blocks, caches.SCRIBBLE)
                    self._outcomes[ended.request_id] = ended.outcome


def _cache(setup: Setup) -> tuple[BlockCache, Staging | None]:
    """The cache, and what transports need beside it if it is on a device."""
    if setup.device.startswith("emulated"):
        cache, device = host_device.make(setup.shape, setup.seed)
        return cache, Staging(device, cache, setup.staging_bytes)
    found = caches.make(setup.shape, setup.seed, setup.device.removesuffix(ASKED))
    return found, open_staging(found, setup.staging_bytes, sends=True, receives=True)


class _Interruptible:
    """A receiver whose fetches send signals between two messages, as `acts` says of their jobs."""

    def __init__(self, inner: Receiver) -> None:
        self.name, self._inner = inner.name, inner
        self.acts: dict[int, tuple[Act | None, Act | None]] = {}  # by the id of the job

    def open(self, offer: bytes) -> RemoteCache | None:
        cache = self._inner.open(offer)
        if isinstance(cache, ReadableCache):
            return _InterruptibleReads(cache, self.acts)
        return None if cache is None else _InterruptibleCache(cache, self.acts)

    def close(self) -> None:
        self._inner.close()


class _InterruptibleCache:
    """Signals are sent before and after `receive`."""

    def __init__(self, inner: Any, acts: dict[int, tuple[Act | None, Act | None]]) -> None:
        self.name, self._inner, self._acts = inner.name, inner, acts

    def request(self, job: FetchJob) -> bytes:
        request: bytes = self._inner.request(job)
        return request

    def prepare(self, job: FetchJob) -> None:
        self._inner.prepare(job)

    def receive(self, job: FetchJob, answer: bytes) -> int:
        moved: int = self._interrupted(job, lambda: self._inner.receive(job, answer))
        return moved

    def _interrupted(self, job: FetchJob, call: Callable[[], Any]) -> Any:
        before, after = self._acts.get(id(job), (None, None))
        if before:
            before()
        moved = call()
        if after:
            after()
        return moved


class _InterruptibleReads(_InterruptibleCache, ReadableCache):
    """Around `read`, too."""

    def is_alive(self) -> bool:
        alive: bool = self._inner.is_alive()
        return alive

    def reading(
        self, slot: int, lease: int
    ) -> contextlib.AbstractContextManager[LeaseEntry | None]:
        entry: contextlib.AbstractContextManager[LeaseEntry | None]
        entry = self._inner.reading(slot, lease)
        return entry

    def read(self, entry: LeaseEntry, part: p.Part, job: FetchJob) -> int | None:
        moved: int | None = self._interrupted(job, lambda: self._inner.read(entry, part, job))
        self._acts.pop(id(job), None)  # if it asks now, that is another matter
        return moved

    def still_there(self, entry: LeaseEntry) -> bool:
        found: bool = self._inner.still_there(entry)
        return found


class Remote:
    """A worker in a process of its own."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, setup), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0
        self.endpoint: Endpoint = self.result(60)

    def call(self, method: str, *args: Any, **named: Any) -> Any:
        """What `Worker`'s method of this name returns or raises there."""
        self.start(method, *args, **named)
        return self.result()

    def start(self, method: str, *args: Any, **named: Any) -> None:
        """Call, without waiting for the end; one call at a time."""
        self._pipe.send((method, args, named))

    def result(self, seconds: float = 20) -> Any:
        """The end of the call that was started. EOFError: the process is gone."""
        assert self._pipe.poll(seconds), f"the worker has not answered for {seconds} s"
        fine, value = self._pipe.recv()
        if not fine:
            raise value
        return value

    def signal(self, number: signal.Signals) -> None:
        """When this is over it has taken effect."""
        Act(number, self.pid)()
        if number == signal.SIGKILL:
            self._process.join(5)

    def is_alive(self) -> bool:
        return is_running(self.pid)

    def close(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGCONT)
            self.start("close")
            self.result()
        self._process.join(20)
        self._pipe.close()
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError("the worker does not end")
        crashed = self._process.exitcode
        assert crashed in (0, 1, -signal.SIGKILL), f"the worker ended with {crashed}"


def wait_until(true: Any, seconds: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def is_stopped(pid: int) -> bool:
    """Every thread of it: they stop one after the other."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # a thread ended just now
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _act(given: Act | signal.Signals | None) -> Act | None:
    return Act(given) if isinstance(given, signal.Signals) else given


def _serve(pipe: Connection, setup: Setup) -> None:
    worker = Worker(setup)
    pipe.send((True, worker.endpoint))
    method = ""
    while method != "close":
        try:
            method, args, named = pipe.recv()
        except EOFError:
            os._exit(1)  # whoever drives us is gone
        try:
            answer = (True, getattr(worker, method)(*args, **named))
        except Exception as error:  # noqa: BLE001 - it is raised where the call came from
            answer = (False, error)
        pipe.send(answer)
