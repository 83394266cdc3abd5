"""A made checkpoint is a real one: other libraries load it, and the same seed gives its bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.errors import ConfigError
from disagg.testing.checkpoint import MARK, Shape, make_model

tokenizers = pytest.importorskip("tokenizers")

SMALL: dict[str, Any] = {"layers": 2, "hidden": 64, "head_dim": 32, "vocab_size": 600}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    assert make_model(folder, **SMALL)
    return folder


def test_the_seed_decides_every_byte(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "same", **SMALL)
    make_model(tmp_path / "other", **SMALL, seed=1)
    assert digests(tmp_path / "same") == digests(model)
    other = digests(tmp_path / "other")
    assert other["model.safetensors"] != digests(model)["model.safetensors"]
    assert other["tokenizer.json"] == digests(model)["tokenizer.json"]


def test_the_same_model_is_left_alone(model: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert make_model(model, **SMALL) is False
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_another_model_is_not_overwritten(model: Path) -> None:
    with pytest.raises(ConfigError, match="layers 2 instead of 3"):
        make_model(model, **{**SMALL, "layers": 3})


@pytest.mark.parametrize("content", [None, "no json", "[]", "{}"])
def test_a_strangers_folder_is_not_overwritten(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "mine").write_text("precious")
    if content is not None:
        (tmp_path / MARK).write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        make_model(tmp_path, **SMALL)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("disagg.testing.checkpoint._write_weights", full)
    with pytest.raises(ConfigError, match="No space left"):
        make_model(tmp_path / "model", **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written"):
        make_model(tmp_path / "file" / "model", **SMALL)


def test_impossible_parameters_are_all_told() -> None:
    with pytest.raises(ConfigError) as caught:
        make_model("/nonexistent", layers=0, head_dim=9, vocab_size=3, seed=-1, dtype="int8")
    options = [line.split(":")[0] for line in caught.value.problems]
    assert options == ["--layers", "--head-dim", "--vocab-size", "--seed", "--dtype"]


def test_heads_are_a_multiple_of_the_kv_heads() -> None:
    def heads(hidden: int, kv_heads: int, head_dim: int) -> int:
        return Shape(1, hidden, kv_heads, head_dim, 512, 0, "float32", 1024).heads

    assert heads(256, 2, 64) == 4
    assert heads(256, 8, 128) == 8
    assert heads(1024, 8, 64) == 16


def test_the_bench_model_has_32_kib_of_kv_per_token() -> None:
    assert Shape(8, 256, 8, 128, 4096, 0, "bfloat16", 32768).kv_bytes_per_token() == 32 << 10


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_weights_are_valid_safetensors(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    make_model(tmp_path / "model", **{**SMALL, "dtype": dtype})
    make_model(tmp_path / "exact", **SMALL)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    assert weights.keys() == exact.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, exact[name].to(tensor.dtype)), name
    assert np.isclose(exact["lm_head.weight"].std().item(), 1.28 / 8, rtol=0.05)


def test_transformers_runs_it(model: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.tensor([[5, 6, 7, 8]])
    answer = loaded.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)
    assert len(set(answer[0, 4:].tolist())) > 8, "greedy output must not collapse"


def test_the_tokenizer_is_complete(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == SMALL["vocab_size"]
    text = "Any text: naïve, 漢字 🙂\n\tand   spaces."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert all(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    config = json.loads((model / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"]


def test_the_chat_template_marks_turns(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_any_vocabulary_size_is_filled_exactly(tmp_path: Path) -> None:
    for size in (259, 300, 5000):
        folder = tmp_path / str(size)
        make_model(folder, **{**SMALL, "layers": 1, "vocab_size": size})
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.get_vocab_size() == size


def test_a_model_without_weights_passes_for_no_other(tmp_path: Path) -> None:
    target = tmp_path / "model"
    assert make_model(target, layers=1, weights=False)
    assert not list(target.glob("*.safetensors"))
    assert not make_model(target, layers=1, weights=False)
    with pytest.raises(ConfigError, match="without weights; choose another folder"):
        make_model(target, layers=1)
    whole = tmp_path / "whole"
    assert make_model(whole, layers=1)
    assert not make_model(whole, layers=1, weights=False), "weights do no harm"
