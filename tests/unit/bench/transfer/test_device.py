"""`bench transfer --device cuda` where there is no GPU: the same code over host memory."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transport.host_device import COMPILER, HostDevice
from unit.bench.transfer.fake_ends import FakeConsumer, FakeProducer

from disagg.bench.results import Output
from disagg.bench.transfer import args as transfer_args
from disagg.bench.transfer import ceilings, gpus
from disagg.bench.transfer import run as transfer
from disagg.bench.transfer.gpus import GpuPlace, Places
from disagg.bench.transfer.ours import Setup
from disagg.bench.transfer.peers import reason_against, spread
from disagg.bench.transfer.plan import Ids, TransferCase, TransferPlan
from disagg.bench.transfer.report import rows
from disagg.bench.transfer.run import Ends
from disagg.bench.transfer.ways import Pair, Way
from disagg.errors import ConfigError, DisaggError, PeerLost, TransferError
from disagg.testing.child_process import Child, ChildError
from disagg.transport.deadline import Deadline
from disagg.transport.device.base import Wait
from disagg.transport.nixl.settings import is_installed

needs_kernel = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel")
BLOCK = 8192
SOON = 20.0


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def at(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def in_parallel(theirs: Callable[[], Any], ours: Callable[[], Any]) -> Any:
    thread = threading.Thread(target=theirs)
    thread.start()
    found = ours()
    thread.join(SOON)
    assert not thread.is_alive()
    return found


# ---- ceilings over any device ---------------------------------------------------------------


def test_copies_arrive() -> None:
    stream, source, to = HostDevice().stream(), random_bytes(3000), np.zeros(3000, np.uint8)
    pairs = [(at(to) + i, at(source) + i, 1000) for i in (2000, 0)]
    assert ceilings.copy(stream, pairs, Deadline.after(SOON)) > 0
    assert np.array_equal(to[2000:], source[2000:])
    assert np.array_equal(to[:1000], source[:1000])
    assert not to[1000:2000].any()
    stream.close()


def test_copies_by_the_host_arrive_piece_by_piece() -> None:
    device, source, to = HostDevice(), random_bytes(2500), np.zeros(2500, np.uint8)
    stream, pinned = device.stream(), device.pinned(1000)
    whole = at(to), at(source), len(to)
    out, back = ceilings.copy_by_host(stream, whole, pinned, Deadline.after(SOON))
    assert np.array_equal(to, source)
    assert min(out, back) > 0
    stream.close()


def test_a_copy_that_fails_is_told() -> None:
    stream = HostDevice().stream()

    def fail() -> None:
        raise RuntimeError("broken")

    stream.add(fail)
    with pytest.raises(TransferError, match="broken"):
        ceilings.copy(stream, [], Deadline.after(SOON))
    stream.close()


@pytest.fixture
def line() -> tuple[ceilings.Line, ceilings.Line]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = socket.create_connection(listening.getsockname())
        return ceilings.Line(listening.accept()[0], 5), ceilings.Line(dialled, 5)


def test_a_line_carries_the_buffer_over_and_over(line: tuple[ceilings.Line, ...]) -> None:
    theirs, ours = line
    content = random_bytes(len(theirs.buffer)).tobytes()
    theirs.buffer[:] = content

    def send() -> None:
        theirs.await_go()
        theirs.send(2 * len(content) + 1000)

    def receive() -> None:
        ours.go()
        ours.receive(len(content))
        assert bytes(ours.buffer) == content
        ours.buffer[:] = bytes(len(content))
        ours.receive(len(content) + 1000)

    in_parallel(send, receive)
    assert bytes(ours.buffer) == content
    ours.close()
    with pytest.raises(PeerLost):
        theirs.await_go()
    theirs.close()


def test_messages_of_nccl_arrive_in_order() -> None:
    # Of a large memory, few messages.
    assert list(ceilings.large_messages(7, (1 << 30) + 5)) == [(7, 1 << 30), (7 + (1 << 30), 5)]
    devices = [HostDevice(), HostDevice()]
    streams, joining = [d.stream() for d in devices], [d.communicators() for d in devices]
    source, to = random_bytes(3000), np.zeros(3000, np.uint8)
    identity, ranks = joining[0].new_id(), dict[int, Any]()

    def join(rank: int) -> None:
        wait = Wait(Deadline.after(SOON), lambda: None)
        ranks[rank] = joining[rank].join(identity, rank, wait)

    def send() -> None:
        pieces = [(at(source) + i, 1000) for i in (0, 1000, 2000)]
        ceilings.send(ranks[0], streams[0], pieces, Deadline.after(SOON))

    def receive() -> None:
        pieces = [(at(to) + i, 1000) for i in (2000, 1000, 0)]
        ceilings.receive(ranks[1], streams[1], pieces, Deadline.after(SOON))

    in_parallel(lambda: join(0), lambda: join(1))
    in_parallel(send, receive)
    assert np.array_equal(to, source.reshape(3, 1000)[::-1].reshape(-1))
    for rank in ranks.values():
        rank.abort()
    for stream in streams:
        stream.close()


# ---- the ends -------------------------------------------------------------------------------


@pytest.fixture
def ends(tmp_path: Path) -> tuple[FakeProducer, FakeConsumer]:
    setup = Setup(2 * 10 * BLOCK, 2, "emulated", tmp_path, 8 * BLOCK)
    ends = FakeProducer(setup), FakeConsumer(setup)
    endpoint, _ = ends[0].serve([], BLOCK)
    ends[1].connect([], BLOCK, endpoint)
    return ends


@needs_kernel
@pytest.mark.parametrize("shared", [True, False])
def test_copies_of_the_ends(ends: Any, shared: bool) -> None:
    producer, consumer = ends
    consumer.use_source(None if shared else producer.exported())
    here, there = [[3, 1], [7]], [[0, 9], [4]]
    consumer.copy("blocks", here, there)
    assert consumer.wrong_blocks(here, there) == 0
    assert consumer.wrong_blocks(here, [[0, 9], [5]]) == 2  # in each layer
    consumer.wipe()
    consumer.copy("flat", here, there)
    assert consumer.wrong_pages(here) == 0
    assert consumer.wrong_pages([[*here[0], *here[1], 8]]) == 4  # pages of one block more
    assert consumer.copy_by_host(here) > 0
    for end in ends:
        end.leave()
    assert producer.staging is consumer.staging is None


@needs_kernel
def test_what_failed_is_not_used_again(ends: Any) -> None:
    producer, consumer = ends
    with pytest.raises(DisaggError, match="no source"):
        consumer.copy("flat", [[0]], [[0]])
    port = producer.listen()
    consumer.dial(port)
    producer.accept()
    producer.leave()
    with pytest.raises(PeerLost):
        consumer.receive_bare([[0]])
    with pytest.raises(DisaggError, match="no line"):
        consumer.receive_bare([[0]])
    consumer.leave()


@needs_kernel
def test_nccl_of_the_ends(ends: Any) -> None:
    producer, consumer = ends
    port = producer.listen()
    consumer.dial(port)
    producer.accept()
    identity = producer.nccl_id()
    in_parallel(lambda: producer.join(identity, 0), lambda: consumer.join(identity, 1))
    here, there = [[3, 1, 7]], [[0, 9, 4]]

    def move(kind: str) -> None:
        in_parallel(
            lambda: producer.send_nccl(kind, there), lambda: consumer.receive_nccl(kind, here)
        )

    move("blocks")
    assert consumer.wrong_blocks(here, there) == 0
    consumer.wipe()
    move("flat")
    assert consumer.wrong_pages(here) == 0
    in_parallel(lambda: producer.send_bare(there), lambda: consumer.receive_bare(here))
    for end in ends:
        end.leave()
    with pytest.raises(DisaggError, match="not joined"):
        consumer.receive_nccl("flat", here)


@needs_kernel
@pytest.mark.parametrize("shared", [True, False])
def test_a_run_between_processes(tmp_path: Path, shared: bool) -> None:
    plan = TransferPlan(
        ["cuda_ipc", "nccl", "tcp", "shared_storage"], [1, 2], [65536], [1], "cuda", 1, 4, 4 << 20
    )
    places = Places(GpuPlace("emulated", {"NCCL_HOSTID": "out"}), GpuPlace("emulated"), shared)
    ends = Ends(FakeProducer, FakeConsumer, places)
    figures = tmp_path / "figures.json"
    assert transfer.measure(plan, ends, with_peer=False, output=Output(figures)) == 0
    report = json.loads(figures.read_text())
    assert (report["problems"], report["gpus"], report["layers"]) == ({}, ["stand-in"], 4)
    ways = {row["way"] for row in report["rows"] if row["megabytes"] == 1}
    assert ways == {
        "device copy", "PCIe", "sockets bare", "NCCL bare", "copy per block", "NCCL per block",
        "cuda_ipc", "nccl", "tcp", "shared_storage",
    }  # fmt: skip
    # What takes a call for each block only in the smallest size, and that is said.
    assert {row["way"] for row in report["rows"] if row["megabytes"] == 2} == ways - {
        "NCCL per block"
    }
    assert any("NCCL per block: with 1 MB only" in note for note in report["notes"])


@needs_kernel
def test_a_run_that_is_ended_shows_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And during what it was ended; figures of a part are written to no file."""
    once = transfer._once

    def ended(way: Way, here: Ids, there: Ids, number: int) -> float:
        if (way.name, number) == ("tcp", 2):
            raise KeyboardInterrupt
        return once(way, here, there, number)

    monkeypatch.setattr(transfer, "_once", ended)
    plan = TransferPlan(["cuda_ipc", "tcp"], [1], [65536], [1], "cuda", 3, 4, 4 << 20)
    places = Places(GpuPlace("emulated"), GpuPlace("emulated"), shared=True)
    figures = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        transfer.measure(
            plan,
            Ends(FakeProducer, FakeConsumer, places),
            with_peer=False,
            output=Output(figures),
        )
    shown = capsys.readouterr().out
    assert "ended while measuring 1 MB x 1, 64 KiB: tcp; so far:" in shown
    assert all(name in shown.partition("so far:")[2] for name in ("cuda_ipc", "tcp", "NCCL bare"))
    assert not figures.exists()


class _FakeChild:
    def __init__(self, log: list[str], error: ChildError | None = None) -> None:
        self.log, self.error = log, error

    def start_call(self, method: str) -> None:
        self.log.append(f"begin {method}")

    def result(self, timeout_s: float) -> None:
        self.log.append("result")

    def call(self, method: str, timeout_s: float) -> int:
        self.log.append(method)
        if self.error is not None:
            raise self.error
        return 7


def test_the_producers_answer_is_taken_also_after_a_failure() -> None:
    log: list[str] = []
    fine = Pair(cast("Child", _FakeChild(log)), cast("Child", _FakeChild(log)))
    assert fine.both(("send",), ("receive",)) == 7
    broken = Pair(fine.producer, cast("Child", _FakeChild(log, ChildError("no"))))
    with pytest.raises(ChildError, match="no"):
        broken.both(("send",), ("receive",))
    assert log == ["begin send", "receive", "result"] * 2


# ---- plan and report ------------------------------------------------------------------------


def test_defaults_are_those_of_the_device() -> None:
    plan = TransferPlan.of("cuda", 5, sizes=None, layers=None)
    assert [case.blocks for case in plan.cases()] == [62, 512, 4096]  # of 16 tokens
    assert (plan.layers, plan.block_bytes, plan.concurrency) == (32, (65536,), (1,))
    assert plan.transports == ("cuda_ipc", "nccl", "tcp", "shared_storage")
    plan.check()
    plan = TransferPlan.of("cpu", 5, sizes=[1])
    assert (plan.layers, plan.sizes) == (8, [1])
    nixl = ("nixl",) if is_installed() else ()
    assert plan.transports == ("process_memory", *nixl, "tcp", "shared_storage")


def test_options_without_typer() -> None:
    given = "--device cuda --sizes 1,2 --layers 4 --staging-mb 2 --no-peer --transports nccl,tcp"
    given += " --results r"
    asked = transfer_args.parse(given.split())
    assert asked.plan == TransferPlan.of(
        "cuda", 5, sizes=[1, 2], layers=4, staging_bytes=2 << 20, transports=["nccl", "tcp"]
    )
    assert (asked.with_peer, asked.output) == (False, Output(None, Path("r")))


def test_ratios_are_of_the_slowest_ceiling() -> None:
    plan = TransferPlan(["tcp"], [1], [65536], [1], "cuda", 1)
    case = TransferCase(1, 65536, 1)
    samples = {
        (case, "device copy"): [0.1],
        (case, "PCIe"): [0.2],
        (case, "sockets bare"): [0.3],
        (case, "tcp"): [0.4],
        (case, "cuda_ipc"): [0.125],
        (case, "nccl"): [0.5],
        (case, "shared_storage"): [0.6],
    }
    found = {row["way"]: row for row in rows(plan, samples, [], [])}
    keys = "ceiling", "over_ceiling", "aim"
    ratios = {way: tuple(row[key] for key in keys) for way, row in found.items()}
    assert ratios["tcp"] == ("sockets bare", 0.75, 0.8)
    assert ratios["cuda_ipc"] == ("device copy", 0.8, 0.8)
    assert ratios["nccl"] == (None, None, None)  # its ceiling was not measured
    assert ratios["shared_storage"] == ratios["PCIe"] == (None, None, None)
    samples[case, "PCIe"] = [0.35]
    (row,) = [row for row in rows(plan, samples, [], []) if row["way"] == "tcp"]
    assert (row["ceiling"], row["over_ceiling"]) == ("PCIe", 0.875)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device: cuda — no GPU here"):
        transfer.run(TransferPlan.of("cuda", 1), with_peer=False, output=Output())
    with pytest.raises(ConfigError, match="nccl: moves between GPUs only"):
        TransferPlan.of("cpu", 1, transports=["nccl"]).check()


@pytest.mark.parametrize("count", [1, 2])
def test_places(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    places = gpus.choose("cuda")
    devices = [places.producer.device, places.consumer.device]
    assert devices == ["cuda:0", "cuda:0" if count == 1 else "cuda:1"]
    hosts = {place.env.get("NCCL_HOSTID") for place in (places.producer, places.consumer)}
    assert places.shared == (count == 1) == (len(hosts) == 2)


def test_the_peer_moves_the_same_bytes_as_fewer_layers() -> None:
    plan = TransferPlan(["tcp"], [4], [65536], [1], "cuda", 1, 16)
    blocks = plan.blocks(65536)
    (ids,) = spread(plan, 65536, [[1, 0]])
    # Block b of layer l of 16 is where block (l % 2) * blocks + b of layer l // 2 of 8 is.
    assert ids == [1, 0, blocks + 1, blocks]
    assert reason_against(plan, shared=False)
    odd = TransferPlan(["tcp"], [4], [65536], [1], "cuda", 1, 12)
    assert reason_against(odd, shared=True)
