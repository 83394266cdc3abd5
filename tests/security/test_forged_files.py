"""Files that others may write are believed only with the deployment's secret. Threat model, line 6.

The forger has every right on the folder and knows our formats, but not the secret.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from transport import caches
from transport.caches import PLAIN
from unit.store.chunks import cut, empty, key_of, path_of
from unit.store.chunks import open_directory as opened

from disagg.checksums import Checksum
from disagg.errors import TransferError
from disagg.private_files import PrivateFolder
from disagg.store.base import ReadOutcome, WriteOutcome
from disagg.transport.base import FetchJob
from disagg.transport.deadline import Deadline
from disagg.transport.shared_storage import SharedStorageReceiver, SharedStorageSender, Storage

OURS = Checksum.named("keyed", b"files", b"the deployment's secret")
THEIRS = [Checksum.named("keyed", b"files", b"a guessed secret"), Checksum()]
KEY, OTHER_KEY = key_of(1), key_of(2)


def content(byte: int, size: int) -> bytes:
    return bytes([byte]) * size


@pytest.mark.parametrize("theirs", THEIRS, ids=["another key", "no key"])
def test_a_forged_chunk_is_damaged(tmp_path: Path, theirs: Checksum) -> None:
    ours, forger = opened(tmp_path, checksum=OURS), opened(tmp_path, checksum=theirs)
    size = ours.chunk_bytes
    assert forger.write(KEY, cut(content(7, size))).outcome is WriteOutcome.WRITTEN
    memory, buffers = empty()
    assert ours.read(KEY, buffers).outcome is ReadOutcome.DAMAGED
    assert not path_of(tmp_path, KEY).exists(), "it would be read again"
    assert ours.write(KEY, cut(content(3, size))).outcome is WriteOutcome.WRITTEN
    assert ours.read(KEY, buffers).ok
    assert bytes(memory) == content(3, size)


def test_our_own_chunk_under_another_key_is_damaged(tmp_path: Path) -> None:
    """Whoever may write can copy what we wrote, with a head made for its new name."""
    ours = opened(tmp_path, checksum=OURS)
    ours.write(KEY, cut(content(3, ours.chunk_bytes)))
    copied = (
        path_of(tmp_path, KEY).read_bytes().replace(KEY.hex().encode(), OTHER_KEY.hex().encode())
    )
    target = path_of(tmp_path, OTHER_KEY)
    target.parent.mkdir(exist_ok=True, mode=0o700)
    target.write_bytes(copied)
    assert ours.read(OTHER_KEY, empty()[1]).outcome is ReadOutcome.DAMAGED


def test_a_fast_checksum_would_have_believed_it(tmp_path: Path) -> None:
    """So the tests above test the key."""
    fast, forger = opened(tmp_path, checksum=Checksum()), opened(tmp_path, checksum=Checksum())
    forger.write(KEY, cut(content(7, fast.chunk_bytes)))
    assert fast.read(KEY, empty()[1]).ok


class Handoff:
    """A file on its way between two workers of one deployment."""

    def __init__(self, folder: Path) -> None:
        storage = Storage(PrivateFolder(folder), 1 << 30, checksum=OURS)
        self.source, self.target = caches.make(PLAIN, 1), caches.make(PLAIN, None)
        self.sender = SharedStorageSender(self.source, storage)
        files = SharedStorageReceiver(self.target, storage).open(self.sender.offer())
        assert files is not None
        self.files = files
        self.answer = self.sender.send(self.source.whole([1, 2]), b"", Deadline.after(10))
        (self.path,) = folder.glob("*.safetensors")

    def receive(self) -> None:
        self.files.receive(FetchJob(self.target.whole([3, 4]), Deadline.after(10)), self.answer)


def test_a_forged_handoff_is_refused(tmp_path: Path) -> None:
    handoff = Handoff(tmp_path / "folder")
    data = bytearray(handoff.path.read_bytes())
    data[-8:] = bytes(8)
    handoff.path.write_bytes(data)
    with pytest.raises(TransferError) as error:
        handoff.receive()
    assert error.value.reason == "storage_checksum"
    handoff.sender.close()


@pytest.mark.parametrize("plant", ["fifo", "folder", "symlink"])
def test_what_is_no_file_hangs_nobody(tmp_path: Path, plant: str) -> None:
    handoff = Handoff(tmp_path / "folder")
    handoff.path.unlink()
    match plant:
        case "fifo":
            os.mkfifo(handoff.path)
        case "folder":
            handoff.path.mkdir()
        case "symlink":
            handoff.path.symlink_to("/dev/zero")
    began = time.monotonic()
    with pytest.raises(TransferError) as error:
        handoff.receive()
    assert error.value.reason == "storage_read"
    assert time.monotonic() - began < 5
    handoff.sender.close()


def test_engines_with_different_checksums_do_not_use_the_folder(tmp_path: Path) -> None:
    handoff = Handoff(tmp_path / "folder")
    storage = Storage(PrivateFolder(tmp_path / "folder"), 1 << 30, checksum=OURS)
    other = dataclasses.replace(storage, checksum=Checksum())
    receiver = SharedStorageReceiver(handoff.target, other)
    assert receiver.open(handoff.sender.offer()) is None
    handoff.receive()
    handoff.sender.close()
