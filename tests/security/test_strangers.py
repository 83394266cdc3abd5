"""Peers without the secret cost a producer little, and keep no real peer out.

Real processes over loopback: a producer, ten strangers that flood its port, and real consumers.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from security.flood import KINDS
from transport.caches import PLAIN
from transport.pairs import Pair
from transport.worker import FINGERPRINT, SECRET, Remote, Setup, Worker, wait_until

from disagg.errors import TransferError
from disagg.transport.control.client import Peers
from disagg.transport.control.listener import _MAX_STRANGERS
from disagg.transport.deadline import Deadline
from disagg.transport.tcp.pool import Pool

FLOOD = Path(__file__).with_name("flood.py")
STRANGERS = 10
HELLO_S = 10.0  # as a fetch has it at least


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    folder = tmp_path / "storage"
    folder.mkdir(mode=0o700)
    producer = Remote(Setup("tcp", "cpu", PLAIN, 1, folder))
    consumer = Worker(Setup("tcp", "cpu", PLAIN, None, folder))
    producer.call("log_to", tmp_path / "log")
    yield Pair(producer, consumer, PLAIN)
    consumer.close()
    producer.close()


@contextmanager
def flooded(ports: Sequence[int], strangers: int = STRANGERS) -> Iterator[None]:
    """Strangers of each kind at these ports in turn."""
    with ExitStack() as stack:
        for number in range(strangers):
            port, kind = ports[number % len(ports)], KINDS[number // len(ports) % len(KINDS)]
            command = [sys.executable, "-S", str(FLOOD), "127.0.0.1", str(port), kind]
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        time.sleep(1)
        yield


class Usage:
    """The most that a process took of memory, threads and descriptors, sampled."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.mebibytes = self.threads = self.descriptors = 0
        self._stop = threading.Event()
        self.sample()
        self.before = self.mebibytes, self.threads, self.descriptors
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def sample(self) -> None:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        self.mebibytes = max(self.mebibytes, int(fields["VmRSS"].split()[0]) >> 10)
        self.threads = max(self.threads, int(fields["Threads"]))
        self.descriptors = max(self.descriptors, len(os.listdir(f"/proc/{self._pid}/fd")))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.sample()


def hellos(pair: Pair, count: int) -> list[float]:
    """How many seconds each took: half on the control channel, half on tcp's data port."""
    offer = msgspec.msgpack.decode(data_offer(pair))

    def one(number: int) -> float:
        began = time.monotonic()
        if number % 2:
            peers = Peers("engine", FINGERPRINT, SECRET)
            with peers.connection(pair.producer.endpoint, Deadline.after(HELLO_S)):
                took = time.monotonic() - began
            peers.close()
        else:
            pool = Pool(SECRET)
            with pool.connection((offer[0], offer[1]), Deadline.after(HELLO_S)):
                took = time.monotonic() - began
            pool.close()
        return took

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(one, range(count)))


def data_offer(pair: Pair) -> bytes:
    with pair.consumer.peers.connection(pair.producer.endpoint, Deadline.after(5)) as connection:
        return connection.welcome.offers["tcp"]


def check(pair: Pair, log: Path, count: int) -> None:
    ports = [pair.producer.endpoint.port, msgspec.msgpack.decode(data_offer(pair))[1]]
    hellos(pair, 20)
    usage = Usage(pair.producer.pid)
    began = time.monotonic()
    try:
        with flooded(ports):
            took = sorted(hellos(pair, count))  # none is lost, or this raises
    finally:
        usage.close()
    minutes = (time.monotonic() - began) / 60
    mebibytes, threads, descriptors = usage.before
    print(
        f"{count} hellos: median {took[count // 2]:.3f} s, longest {took[-1]:.3f} s; from "
        f"{mebibytes} to {usage.mebibytes} MiB, {threads} to {usage.threads} threads, "
        f"{descriptors} to {usage.descriptors} descriptors, "
        f"log of {log.stat().st_size} bytes in {minutes:.1f} minutes"
    )
    assert usage.mebibytes - mebibytes < 40
    assert usage.threads - threads < 40, "strangers have no threads"
    assert usage.descriptors - descriptors < 2 * _MAX_STRANGERS + 60
    lines = log.read_text().splitlines()
    assert len(lines) < 60 * (1 + minutes)
    assert wait_until(lambda: pair.producer.call("connections") <= 1, 5)
    pair.producer.call("grant", 0, [1, 2])
    pair.fetch(0, [3, 4])
    assert pair.is_right([1, 2], [3, 4])


def test_real_peers_are_answered_under_a_flood(pair: Pair, tmp_path: Path) -> None:
    check(pair, tmp_path / "log", 500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_real_peers_are_answered_under_a_flood(pair: Pair, tmp_path: Path) -> None:
    check(pair, tmp_path / "log", 10_000)


def test_a_wrong_secret_is_shown_nowhere(pair: Pair, tmp_path: Path) -> None:
    """Neither secret, nor parts of them, in errors and logs of both ends."""
    wrong = b"wrong horse battery staple"
    offer = msgspec.msgpack.decode(data_offer(pair))
    peers, pool = Peers("engine", FINGERPRINT, wrong), Pool(wrong)
    soon = Deadline.after(5)
    with pytest.raises(TransferError) as refused, peers.connection(pair.producer.endpoint, soon):
        pass
    with pytest.raises(TransferError) as data_refused, pool.connection((offer[0], offer[1]), soon):
        pass
    texts = [str(one.value.__cause__ or one.value) for one in (refused, data_refused)]
    shown = f"{texts} {peers!r} {pool!r} {(tmp_path / 'log').read_text()}"
    assert "not signed with this deployment's secret" in shown
    for secret in (SECRET, wrong):
        for part in (*secret.decode().split(), secret.hex()[:12]):
            assert part not in shown


def test_strangers_hold_nothing_when_they_are_gone(pair: Pair) -> None:
    data_offer(pair)
    usage = Usage(pair.producer.pid)
    usage.close()
    with flooded([pair.producer.endpoint.port], strangers=2):
        time.sleep(random.uniform(0.1, 0.5))

    def as_before() -> bool:
        now = Usage(pair.producer.pid)
        now.close()
        return now.threads <= usage.threads and now.descriptors <= usage.descriptors

    assert wait_until(as_before, 5)
