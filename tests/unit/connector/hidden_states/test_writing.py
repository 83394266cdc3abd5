"""The writer and its readers: real files, locks and processes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from disagg.connector.hidden_states import (
    HiddenStatesFailed,
    HiddenStatesLost,
    HiddenStatesTimeout,
    cleanup_hidden_states,
    load_hidden_states,
    naming,
    pending_writes,
)
from disagg.connector.hidden_states.device import DeviceBlocks
from disagg.connector.hidden_states.writer import HiddenStatesWriter, Save
from disagg.private_files import PrivateFolder

BLOCK, STATES, HIDDEN, NUM_BLOCKS = 16, 3, 32, 40
BLOCK_BYTES = BLOCK * STATES * HIDDEN * 4
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def caches(device: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """One content as [blocks, states, tokens, hidden] in the layouts that vLLM may choose."""
    torch.manual_seed(0)
    content = torch.randn(NUM_BLOCKS, STATES, BLOCK, HIDDEN).to(device, dtype)
    tokens_first = content.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    padded = torch.zeros(NUM_BLOCKS, 2, STATES, BLOCK, HIDDEN, device=device, dtype=dtype)
    padded[:, 0] = content
    return {"LBHNC": content, "LBNHC": tokens_first, "padded": padded[:, 0]}


class Desk:
    """A writer, and what a scheduler would do with it."""

    def __init__(self, folder: Path, blocks: DeviceBlocks, num_threads: int = 4) -> None:
        self.folder = folder
        self.writer = HiddenStatesWriter(
            PrivateFolder(folder, others="read"),
            blocks,
            num_threads=num_threads,
            layer_ids=[1, 2, 3],
        )
        self.number = 0

    def promise(self, request_id: str = "request") -> str:
        self.number += 1
        self.writer.promise(self.number)
        return str(self.folder / naming.file_name(request_id, self.writer.life, self.number))

    def save(self, tokens: int, block_ids: list[int], request_id: str = "request") -> str:
        path = self.promise(request_id)
        self.writer.submit(Save(request_id, path, range(tokens), block_ids))
        return path


class Gate(DeviceBlocks):
    """A device that reads when it is told to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open = threading.Event()

    def read(self, *args: Any) -> torch.Tensor:
        assert self.open.wait(60)
        return super().read(*args)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "states", DeviceBlocks(caches("cpu")["LBNHC"], 4 * BLOCK_BYTES))
    yield desk
    desk.writer.close(10)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[Desk, Gate]]:
    gate = Gate(caches("cpu")["LBNHC"], 4 * BLOCK_BYTES)
    desk = Desk(tmp_path / "states", gate)
    yield desk, gate
    gate.open.set()
    desk.writer.close(10)


@contextmanager
def elsewhere(folder: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A writer in another process, and the path of its file."""
    script = Path(__file__).with_name("written_elsewhere.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


# ---- what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "padded"])
@pytest.mark.parametrize("buffer_blocks", [1, 4, 100])
def test_a_file_holds_the_blocks_in_order(
    tmp_path: Path, device: str, dtype: torch.dtype, layout: str, buffer_blocks: int
) -> None:
    cache = caches(device, dtype)[layout]
    desk = Desk(tmp_path, DeviceBlocks(cache, buffer_blocks * BLOCK_BYTES))
    by_token = cache.cpu().permute(0, 2, 1, 3)
    for tokens in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK - 3):
        ids = [7 * i % NUM_BLOCKS for i in range(-(-tokens // BLOCK))]
        path = desk.save(tokens, ids)
        states = load_hidden_states(path, 30)
        assert torch.equal(states["hidden_states"], by_token[ids].flatten(0, 1)[:tokens])
        assert states["hidden_states"].dtype == dtype
        assert states["token_ids"].tolist() == list(range(tokens))
        theirs = safetensors.torch.load_file(path)
        assert theirs.keys() == states.keys()
        assert all(torch.equal(theirs[name], states[name]) for name in theirs)
    desk.writer.close(10)


def test_the_file_says_what_it_is(desk: Desk) -> None:
    path = desk.save(5, [3], "who \ud800 asked")
    load_hidden_states(path)
    with safetensors.safe_open(path, "pt") as file:
        expected = {"format": "pt", "layer_ids": "1,2,3", "request_id": "who ? asked"}
        assert file.metadata() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_reads_wait_for_the_models_stream(tmp_path: Path) -> None:
    """Blocks that the model is still writing when the save is submitted."""
    device = "cuda"
    cache = torch.zeros(NUM_BLOCKS, STATES, BLOCK, HIDDEN, device=device)
    desk = Desk(tmp_path, DeviceBlocks(cache, 4 * BLOCK_BYTES))
    square = torch.randn(4096, 4096, device=device)
    for round_ in range(1, 6):
        for _ in range(20):
            square = square @ square / 64
        cache.fill_(round_)
        path = desk.save(NUM_BLOCKS * BLOCK, list(range(NUM_BLOCKS)))
        assert bool((load_hidden_states(path)["hidden_states"] == round_).all())
    desk.writer.close(10)


def test_many_at_once(desk: Desk) -> None:
    def one(index: int) -> bool:
        ids = [index % NUM_BLOCKS, 3]
        path = paths[index]
        states = load_hidden_states(path, 60)["hidden_states"]
        cleanup_hidden_states(path)
        return torch.equal(states, by_token[ids].flatten(0, 1))

    by_token = caches("cpu")["LBNHC"].permute(0, 2, 1, 3)

    paths = [desk.promise("the same id") for _ in range(200)]
    assert len(set(paths)) == 200
    with ThreadPoolExecutor(32) as pool:
        results = [pool.submit(one, index) for index in range(200)]
        for index, path in enumerate(paths):
            save = Save(f"r{index}", path, range(2 * BLOCK), [index % NUM_BLOCKS, 3])
            desk.writer.submit(save)
        assert all(result.result() for result in results)
    assert desk.writer.take_read() == {f"r{index}" for index in range(200)}
    assert desk.writer.take_read() == set()
    ended = desk.writer.take_ended()
    assert len(ended) == 200
    assert all(one.reason is None and one.num_bytes > 2 * BLOCK_BYTES for one in ended)
    assert [path.suffix for path in desk.folder.iterdir()] == [".lock"]


# ---- waiting -----------------------------------------------------------------------------------


def test_a_reader_sleeps_until_the_writer_is_done(gated: tuple[Desk, Gate]) -> None:
    desk, gate = gated
    path = desk.save(100, list(range(7)))
    before = resource.getrusage(resource.RUSAGE_SELF)
    threading.Timer(1.5, gate.open.set).start()
    started = time.monotonic()
    states = load_hidden_states(path, 60)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert states["hidden_states"].shape == (100, STATES, HIDDEN)
    assert time.monotonic() - started > 1.4
    # Nobody looks again and again: a handful of switches, where polling would take hundreds.
    assert after.ru_nvcsw - before.ru_nvcsw < 60


def test_a_timeout_says_path_and_seconds_and_can_be_tried_again(gated: tuple[Desk, Gate]) -> None:
    desk, gate = gated
    path = desk.save(100, list(range(7)))
    threads = threading.active_count()
    for _ in range(5):
        with pytest.raises(HiddenStatesTimeout, match=r"within 0\.05 s") as caught:
            load_hidden_states(path, 0.05)
        assert path in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
    assert threading.active_count() <= threads + 1
    with pytest.raises(HiddenStatesTimeout):
        cleanup_hidden_states(path, timeout=0)
    gate.open.set()
    assert load_hidden_states(path, None)["token_ids"].tolist() == list(range(100))


def test_an_unfinished_file_is_never_seen(gated: tuple[Desk, Gate]) -> None:
    desk, gate = gated
    path = Path(desk.save(100, list(range(7))))
    assert _eventually(lambda: list(desk.folder.glob(".*.tmp")))
    assert not path.exists()
    gate.open.set()
    load_hidden_states(path)
    assert not list(desk.folder.glob(".*.tmp"))


def test_cleanup_waits_so_that_nothing_comes_after_it(gated: tuple[Desk, Gate]) -> None:
    desk, gate = gated
    path = desk.save(100, list(range(7)))
    threading.Timer(0.3, gate.open.set).start()
    cleanup_hidden_states(path)
    assert not os.path.exists(path)
    cleanup_hidden_states(path)  # twice is fine
    with pytest.raises(HiddenStatesFailed, match="removed already"):
        load_hidden_states(path)


def test_cleanup_may_keep_the_file(desk: Desk) -> None:
    path = desk.save(1, [0])
    cleanup_hidden_states(path, keep_hidden_states=True)
    assert load_hidden_states(path)["token_ids"].tolist() == [0]


def test_paths_of_others_are_neither_read_nor_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious.safetensors"
    precious.write_text("mine")
    with pytest.raises(ValueError, match="HiddenStatesConnector"):
        load_hidden_states(precious)
    with pytest.raises(ValueError, match="HiddenStatesConnector"):
        cleanup_hidden_states(precious)
    assert precious.exists()


# ---- failures ----------------------------------------------------------------------------------


def test_a_writer_killed_mid_file(tmp_path: Path) -> None:
    with elsewhere(tmp_path, "stalls") as (process, path):
        (half,) = tmp_path.glob(".*.tmp")
        assert half.stat().st_size > 0
        with pytest.raises(HiddenStatesTimeout):
            load_hidden_states(path, 0.2)
        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(load_hidden_states, path, 60) for _ in range(3)]
            time.sleep(0.2)
            started = time.monotonic()
            os.kill(process.pid, signal.SIGKILL)
            for reader in readers:
                with pytest.raises(HiddenStatesLost, match="ended before"):
                    reader.result(60)
        assert time.monotonic() - started < 10
        assert not Path(path).exists()
        cleanup_hidden_states(path)
    # The next life in this folder tidies up.
    desk = Desk(tmp_path, DeviceBlocks(caches("cpu")["LBNHC"], BLOCK_BYTES))
    assert not half.exists()
    assert [one.name for one in tmp_path.iterdir()] == [f".{desk.writer.life}.lock"]
    with pytest.raises(HiddenStatesLost):
        load_hidden_states(path, 1)
    desk.writer.close(10)
    assert not list(tmp_path.iterdir())


def test_a_writer_killed_before_it_began(tmp_path: Path) -> None:
    with elsewhere(tmp_path, "waits") as (process, path):
        threading.Timer(0.3, process.kill).start()
        with pytest.raises(HiddenStatesLost):
            load_hidden_states(path, None)


def test_a_writer_that_is_stopped_is_not_dead(tmp_path: Path) -> None:
    with elsewhere(tmp_path, "waits") as (process, path):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(HiddenStatesTimeout):
            load_hidden_states(path, 0.3)


def test_a_full_disk_reaches_the_reader(tmp_path: Path) -> None:
    with elsewhere(tmp_path, "small") as (_, path):
        with pytest.raises(HiddenStatesFailed, match="File too large"):
            load_hidden_states(path, 60)
        assert not Path(path).exists()
        assert not list(tmp_path.glob(".*.tmp"))
        cleanup_hidden_states(path)
        assert [one.suffix for one in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_reaches_the_reader(desk: Desk) -> None:
    """Not even the reason can be written; and the next file, in a folder mended, is."""
    path = desk.promise()
    shutil.rmtree(desk.folder)
    desk.folder.write_text("no folder")
    desk.writer.submit(Save("request", path, range(3), [1]))
    with pytest.raises(HiddenStatesLost, match="folder was removed"):
        load_hidden_states(path, 30)
    unpromised = desk.promise()
    assert _eventually(lambda: desk.writer.take_read() == {"request"})
    desk.folder.unlink()
    desk.writer.submit(Save("request", unpromised, range(3), [1]))
    with pytest.raises((HiddenStatesFailed, HiddenStatesLost)):
        load_hidden_states(unpromised, 30)
    assert load_hidden_states(desk.save(3, [1]), 30)["token_ids"].tolist() == [0, 1, 2]
    assert _eventually(lambda: len(desk.writer.take_ended()) > 0)


def test_who_waits_while_the_folder_is_removed_and_made_anew(gated: tuple[Desk, Gate]) -> None:
    desk, gate = gated
    first = desk.promise()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(load_hidden_states, first, 30)
        time.sleep(0.2)
        shutil.rmtree(desk.folder)
        gate.open.set()
        second = desk.save(3, [1])
        load_hidden_states(second, 30)
        with pytest.raises(HiddenStatesTimeout):
            load_hidden_states(first, 0.1)
        desk.writer.submit(Save("request", first, range(3), [1]))
        assert reader.result()["token_ids"].tolist() == [0, 1, 2]


def test_a_device_that_fails_reaches_the_reader(desk: Desk) -> None:
    path = desk.save(3, [NUM_BLOCKS])  # there is no such block
    with pytest.raises(HiddenStatesFailed, match="out of range"):
        load_hidden_states(path, 30)
    assert desk.writer.take_read() == {"request"}
    assert [ended.reason for ended in desk.writer.take_ended()] == ["internal"]


def test_too_few_blocks_give_no_file(desk: Desk) -> None:
    with pytest.raises(HiddenStatesFailed, match="1 of 17 tokens have no block"):
        load_hidden_states(desk.save(BLOCK + 1, [0]), 30)


def test_a_problem_found_before_reaches_the_reader(desk: Desk) -> None:
    path = desk.promise()
    desk.writer.submit(Save("request", path, range(3), [], "it was preempted"))
    with pytest.raises(HiddenStatesFailed, match="it was preempted"):
        load_hidden_states(path, 30)
    assert desk.writer.take_read() == set()  # it held no blocks
    cleanup_hidden_states(path)
    assert not os.path.exists(path + ".error")


def test_what_was_withdrawn_leaves_nothing(desk: Desk) -> None:
    path = desk.promise()
    desk.writer.withdraw(desk.number)
    with pytest.raises(HiddenStatesFailed, match="does not exist"):
        load_hidden_states(path, 1)
    assert [one.suffix for one in desk.folder.iterdir()] == [".lock"]


def test_what_an_ending_writer_did_not_write_is_lost(tmp_path: Path) -> None:
    gate = Gate(caches("cpu")["LBNHC"], 4 * BLOCK_BYTES)
    desk = Desk(tmp_path, gate, num_threads=1)
    paths = [desk.save(3, [1]) for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(load_hidden_states, paths[2], 60)
        time.sleep(0.2)
        desk.writer.close(0.1)
        with pytest.raises(HiddenStatesLost):
            reader.result(30)
    gate.open.set()


@pytest.mark.parametrize("size", [0, 4, 8, 60, 300, -1])
def test_a_damaged_file_is_an_error(desk: Desk, size: int) -> None:
    """None of ours is ever seen so; another hand may have been at work."""
    path = Path(desk.save(30, [1, 2]))
    load_hidden_states(path)
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    with pytest.raises(HiddenStatesFailed, match="damaged"):
        load_hidden_states(path)


def test_lives_share_a_folder(tmp_path: Path) -> None:
    blocks = DeviceBlocks(caches("cpu")["LBNHC"], BLOCK_BYTES)
    one, other = Desk(tmp_path, blocks), Desk(tmp_path, blocks)
    assert pending_writes.is_alive(naming.lock_path(tmp_path, one.writer.life))  # not swept
    paths = [one.save(3, [1]), other.save(3, [2])]
    assert len({str(load_hidden_states(path)["hidden_states"]) for path in paths}) == 2
    one.writer.close(1)
    other.writer.close(1)


def test_a_client_needs_neither_vllm_nor_torch_to_import_it() -> None:
    code = (
        "import sys, disagg.connector.hidden_states as h; h.load_hidden_states;"
        "print([m for m in ('vllm', 'torch', 'ray', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _eventually(condition: Callable[[], object], timeout: float = 30) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
