"""Which weights: the same wherever they lie, and others whatever their name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest

from disagg.identity import weights
from disagg.identity.weights import ADAPTER_BYTES, Adapters, checkpoint

Change = Callable[[dict[str, np.ndarray], Path], None]
SIZE = 40_000


def write(folder: Path, change: Change | None = None, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    tensors = {f"layer.{n}": np.full(SIZE, n, np.float32) for n in range(6)}
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "layers": 6}))
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    if change is not None:
        change(tensors, folder)
    save_file(tensors, folder / name)
    return folder


def one_layer(tensors: dict[str, np.ndarray], folder: Path) -> None:
    tensors["layer.3"] *= 1.001


def a_name(tensors: dict[str, np.ndarray], folder: Path) -> None:
    tensors["layer.9"] = tensors.pop("layer.3")


def the_config(tensors: dict[str, np.ndarray], folder: Path) -> None:
    for name in ("config.json", "adapter_config.json"):
        (folder / name).write_text(json.dumps({"hidden_size": 9}))


@pytest.fixture(params=["whole", "sampled"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "sampled":
        monkeypatch.setattr(weights, "_WHOLE", 1000)
        monkeypatch.setattr(weights, "_ENDS", 1000)


@pytest.mark.usefixtures("size")
def test_the_same_anywhere(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), tmp_path / "other"
    shutil.copytree(one, other)
    (other / "config.json").write_text(json.dumps({"layers": 6, "hidden_size": 8}, indent=2))
    (other / "README.md").write_text("not weights")
    assert checkpoint(str(one), None) == checkpoint(str(other), "x")


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("change", [one_layer, a_name, the_config])
def test_others(tmp_path: Path, change: Change) -> None:
    """One layer of which both ends of the file know nothing, a tensor's name, a setting."""
    one, other = write(tmp_path / "one"), write(tmp_path / "other", change)
    assert checkpoint(str(one), None) != checkpoint(str(other), None)


def test_a_large_file_of_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_WHOLE", 1000)
    file, seen = tmp_path / "model.gguf", set[str]()
    for at in (0, 500_000, 999_999):
        data = bytearray(1_000_000)
        data[max(0, at - 20_000) : at + 1] = b"x" * min(at + 1, 20_001)
        file.write_bytes(data)
        seen.add(checkpoint(str(file), None))
    assert len(seen) == 3


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("head", [b"", b"\xff" * 50, b"\x02" + bytes(7) + b"[]", bytes(3000)])
def test_what_is_no_safetensors_file(tmp_path: Path, head: bytes) -> None:
    folder = write(tmp_path / "one")
    (folder / "model.safetensors").write_bytes(head)
    before = checkpoint(str(folder), None)
    (folder / "model.safetensors").write_bytes(head + b"x" * 5000)
    assert checkpoint(str(folder), None) != before


def test_a_repository_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was downloaded, which may be another commit of the same branch."""
    assert checkpoint("org/name", None) == "org/name@default"
    assert checkpoint("not a/name!", "v1") == "not a/name!@v1"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    copies = tmp_path / "models--org--name"
    (copies / "refs").mkdir(parents=True)
    seen = set[str]()
    for commit, change in (("a" * 40, None), ("b" * 40, one_layer)):
        write(copies / "snapshots" / commit, change)
        (copies / "refs" / "main").write_text(commit)
        seen.add(checkpoint("org/name", None))
        assert checkpoint("org/name", None) == checkpoint(str(copies / "snapshots" / commit), None)
    (copies / "snapshots" / ("b" * 40) / "model.safetensors").unlink()
    seen.add(checkpoint("org/name", None))
    assert len(seen) == 3
    assert all(len(one) == 32 for one in seen)


def adapter(folder: Path, number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest("mine", number, str(folder), **more)


def test_adapters(tmp_path: Path) -> None:
    name = "adapter_model.safetensors"
    one = write(tmp_path / "one", name=name)
    other = write(tmp_path / "other", one_layer, name)
    known = Adapters()
    assert known.of(None) == b""
    assert len(known.of(adapter(one))) == ADAPTER_BYTES
    assert known.of(adapter(one)) == Adapters().of(adapter(one))
    assert known.of(adapter(one)) != known.of(adapter(other))
    shutil.copytree(one, tmp_path / "copy")
    assert known.of(adapter(one)) == known.of(adapter(tmp_path / "copy"))


def test_an_adapter_is_what_was_loaded(tmp_path: Path) -> None:
    """Other files in its place are another one as soon as they are loaded: by a new engine, under a
    new number, or in place."""
    name, folder = "adapter_model.safetensors", tmp_path / "one"
    known = Adapters()
    before = known.of(adapter(write(folder, name=name)))
    in_place = known.of(adapter(folder, load_inplace=True))
    shutil.rmtree(folder)
    write(folder, one_layer, name)
    os.utime(folder / name, ns=(1, 1))
    assert known.of(adapter(folder)) == before == in_place
    after = {
        Adapters().of(adapter(folder)),
        known.of(adapter(folder, 2)),
        known.of(adapter(folder, load_inplace=True)),
    }
    assert len(after) == 1
    assert before not in after


@pytest.mark.parametrize("folder", ["gone", "org/gone", "empty"])
def test_an_adapter_that_cannot_be_read_is_nobody_elses(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    path = Path(folder) if "/" in folder else tmp_path / folder
    known = Adapters()
    assert known.of(adapter(path)) == known.of(adapter(path))
    assert [f"adapter {path} cannot be read" in line for line in caplog.messages] == [True]
    assert known.of(adapter(path)) != Adapters().of(adapter(path))
    assert len(known.of(adapter(path, load_inplace=True))) == ADAPTER_BYTES
