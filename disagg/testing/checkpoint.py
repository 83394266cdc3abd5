"""A small, random-weight Qwen3 checkpoint, made without a model hub.

vLLM and transformers load it like any checkpoint; the demo, the tests and the benchmarks serve it.
The same parameters give the same bytes. Must never leave a half-written model under its name, nor
replace a folder that it did not make with the same parameters.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from disagg.errors import ConfigError
from disagg.testing.tokenizer import MIN_VOCABULARY, write_tokenizer

MARK, _WEIGHTS = "disagg_model.json", "model.safetensors"

# Standard deviation of a weight over a fan-in of n is GAIN / sqrt(n). 1.28 is four times the
# 0.02 of an untrained model at n = 256: with 0.02, greedy output repeats one token.
_GAIN = 1.28
# Untrained attention over a long prompt averages all tokens, so the answer hardly depends on any
# one block. With queries and keys twice as long, attention selects tokens: a damaged block then
# changes the answer.
_QUERY_KEY_NORM = 2.0
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FORMAT = 1
"""Incremented whenever the same parameters give other bytes."""


@dataclass(frozen=True)
class Shape:
    """All parameters that determine a model's bytes."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    seed: int
    dtype: str
    max_position_embeddings: int
    format: int = _FORMAT

    @property
    def heads(self) -> int:
        """Attention heads: as many as fill the hidden size, a whole multiple of the KV heads."""
        return max(1, self.hidden // (self.head_dim * self.kv_heads)) * self.kv_heads

    @property
    def intermediate(self) -> int:
        """Width of the feed-forward layer."""
        return 3 * self.hidden

    def kv_bytes_per_token(self) -> int:
        """Size of one token's KV in the model's own dtype."""
        width = 4 if self.dtype == "float32" else 2
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    def problems(self) -> Iterator[str]:
        """One line for each invalid parameter."""
        for name in ("layers", "kv_heads", "max_position_embeddings"):
            if getattr(self, name) < 1:
                yield f"{_option(name)}: {getattr(self, name)} — must be at least 1"
        for name in ("hidden", "head_dim"):
            value = getattr(self, name)
            if value < 8 or value % 8:
                yield f"{_option(name)}: {value} — must be a multiple of 8"
        if self.vocab_size < MIN_VOCABULARY:
            yield f"--vocab-size: {self.vocab_size} — must be at least {MIN_VOCABULARY}"
        if self.seed < 0:
            yield f"--seed: {self.seed} — must not be negative"
        if self.dtype not in _DTYPES:
            yield f"--dtype: {self.dtype!r} — must be one of {', '.join(_DTYPES)}"


def make_model(
    path: str | Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab_size: int = 4096,
    seed: int = 0,
    dtype: str = "float32",
    max_position_embeddings: int = 32768,
    weights: bool = True,
) -> bool:
    """Write the checkpoint; False if the same one is already there.

    weights: without them vLLM draws its own (`--load-format dummy`), so that a large model costs no
    disk; its answers are noise. Raises ConfigError for an invalid parameter, or if the path holds
    something else.
    """
    shape = Shape(
        layers, hidden, kv_heads, head_dim, vocab_size, seed, dtype, max_position_embeddings
    )
    write = _write if weights else _write_configuration
    if problems := list(shape.problems()):
        raise ConfigError(problems)
    target = Path(path).expanduser().absolute()
    if os.path.lexists(target):
        _require_same(target, shape)
        if weights and not (target / _WEIGHTS).exists():
            raise ConfigError(f"{target}: holds this model without weights; choose another folder")
        return False
    try:
        return _publish(target, shape, write)
    except OSError as error:
        raise ConfigError(f"{target}: can't be written ({error.strerror})") from error


def _publish(target: Path, shape: Shape, write: Callable[[Path, Shape], None]) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        draft.chmod(0o755)  # with mkdtemp's 0700 a server of another user could not read it
        write(draft, shape)
        draft.rename(target)
    except OSError:
        if not target.exists():
            raise
        _require_same(target, shape)  # another process was faster
        return False
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _require_same(target: Path, shape: Shape) -> None:
    try:
        there = json.loads((target / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        there = None
    if not isinstance(there, dict):
        raise ConfigError(
            f"{target}: exists and was not made by disagg make-model; choose another folder"
        )
    wanted = asdict(shape)
    if there != wanted:
        other = [name for name in wanted if there.get(name) != wanted[name]]
        differences = ", ".join(f"{n} {there.get(n)} instead of {wanted[n]}" for n in other)
        raise ConfigError(
            f"{target}: holds another model ({differences}); choose another folder, or remove it"
        )


def _write(folder: Path, shape: Shape) -> None:
    _write_weights(folder / _WEIGHTS, shape)
    _write_configuration(folder, shape)


def _write_configuration(folder: Path, shape: Shape) -> None:
    end_of_turn = write_tokenizer(folder, shape.vocab_size, shape.max_position_embeddings)
    _write_json(folder / "config.json", _model_config(shape, end_of_turn))
    _write_json(folder / "generation_config.json", {"eos_token_id": end_of_turn})
    _write_json(folder / MARK, asdict(shape))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _model_config(shape: Shape, end_of_turn: int) -> dict[str, Any]:
    """Qwen3's config.json, with the keys that its checkpoints on the hub have."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": end_of_turn,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def _weights(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Qwen3's weights by name, as [out, in]; norms as [size]."""
    hidden, head_dim = shape.hidden, shape.head_dim
    q_size, kv_size = shape.heads * head_dim, shape.kv_heads * head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (q_size, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, shape.intermediate)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)


def _write_weights(path: Path, shape: Shape) -> None:
    """Write safetensors' format tensor by tensor; the whole model is never in memory."""
    width = 4 if shape.dtype == "float32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, sizes in _weights(shape):
        end = offset + int(np.prod(sizes)) * width
        header[name] = {
            "dtype": _DTYPES[shape.dtype],
            "shape": list(sizes),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    random = np.random.Generator(np.random.PCG64(shape.seed))
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, sizes in _weights(shape):
            file.write(_encoded(_values(random, name, sizes), shape.dtype).tobytes())


def _values(
    random: np.random.Generator, name: str, sizes: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return np.full(sizes, _QUERY_KEY_NORM, dtype=np.float32)
    if len(sizes) == 1:
        return np.ones(sizes, dtype=np.float32)
    scale = np.float32(_GAIN / np.sqrt(sizes[-1]))
    return random.standard_normal(sizes, dtype=np.float32) * scale


def _encoded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Little-endian values of the dtype; bfloat16, which numpy lacks, as rounded upper halves."""
    if dtype == "float32":
        return values.astype("<f4")
    if dtype == "float16":
        return values.astype("<f2")
    bits = values.view(np.uint32)
    to_even = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + to_even) >> 16).astype("<u2")
