"""What vLLM says of a cache, as we read it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from disagg.connector import geometry
from disagg.connector.offload import groups, setup
from disagg.connector.offload.groups import Group
from disagg.errors import ConfigError

SHAPE: dict[str, Any] = {"block_size": 16, "head_size": 8, "dtype": torch.float32}


def of_layers(*specs: KVCacheSpec) -> KVCacheConfig:
    """One group, as vLLM makes it of layers that differ in size alone."""
    named = {f"layer.{number}": spec for number, spec in enumerate(specs)}
    uniform = UniformTypeKVCacheSpecs.from_specs(named)
    assert uniform is not None
    return KVCacheConfig(4, [], [KVCacheGroupSpec(list(named), uniform)])


def full(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(num_kv_heads=heads, **SHAPE)


def test_layers_of_different_sizes_in_one_group() -> None:
    """A draft's beside its model's."""
    specs = full(4), full(4), full(1)
    cache = of_layers(*specs)
    assert geometry.layer_specs(cache.kv_cache_groups[0]) == [*specs]
    assert setup.block_bytes(cache) == 9 * full(1).page_size_bytes
    assert not geometry.has_windows(cache)
    assert groups.read(cache) == [Group()]


def test_windows_in_layers_of_different_sizes() -> None:
    cache = of_layers(
        *(SlidingWindowSpec(num_kv_heads=n, sliding_window=40, **SHAPE) for n in (4, 1))
    )
    assert geometry.has_windows(cache)
    assert groups.read(cache) == [Group(window=40)]


def test_layers_of_one_size() -> None:
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["a", "b"], full(2))])
    assert setup.block_bytes(cache) == 2 * full(2).page_size_bytes


@pytest.mark.parametrize("method", [None, "ngram", "eagle3", "extract_hidden_states"])
def test_which_guesses_are_handed_over(method: str | None) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="m", use_mla=False),
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=16),
        speculative_config=method and SimpleNamespace(method=method),
    )
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["a"], full(2))])
    if method == "extract_hidden_states":
        with pytest.raises(ConfigError, match=r"speculative_config.method: extract_hidden_states"):
            geometry.check_supported(config, cache)
    else:
        geometry.check_supported(config, cache)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", [None, "0", "1"])
def test_hashes_that_no_other_engine_has(
    algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at start: all prompts would be computed, at a hundred requests as at the first."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    if seed is None and algorithm.startswith("xxhash"):
        with pytest.raises(ConfigError, match=f"prefix_caching_hash_algo: {algorithm} — "):
            geometry.hash_seed(config, "x")
        return
    shown = geometry.hash_seed(config, "x")
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert geometry.hash_seed(config, "x") != shown


# ---- which model it is -----------------------------------------------------------------------


def adjust(config: Any) -> Any:
    return config


def fields_of(folder: Path, **more: Any) -> dict[str, str]:
    """Of an engine whose model lies there; `more`: of vLLM's model config, or a draft."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    model: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "hf_overrides": {},
        "hf_config_path": None,
    }
    model |= {"multimodal_config": None, "max_model_len": 4096}
    model |= {"hf_text_config": SimpleNamespace(model_type="qwen3", rope_parameters={})}
    config: Any = SimpleNamespace(speculative_config=more.pop("draft", None))
    config.model_config = SimpleNamespace(**{**model, **more})
    return geometry.model_fields(config)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"rope_parameters": {"rope_theta": 1e6}, "a": 1}, '{"a": 1, "rope_parameters": '),
        (adjust, f"{adjust.__module__}.adjust"),
    ],
)
def test_an_overridden_configuration(tmp_path: Path, overrides: Any, text: str) -> None:
    """Weights alone do not say how far a rotation turns."""
    plain = fields_of(tmp_path)
    assert plain.keys() == {"checkpoint"}
    told = fields_of(tmp_path, hf_overrides=overrides)
    assert told["hf_overrides"].startswith(text)
    assert fields_of(tmp_path, hf_config_path=str(tmp_path)).keys() - plain.keys()
    kwargs = SimpleNamespace(mm_processor_kwargs={"min_pixels": 9})
    told = fields_of(tmp_path, multimodal_config=kwargs)
    assert told["mm_processor_kwargs"] == '{"min_pixels": 9}'


def test_a_draft_with_a_cache(tmp_path: Path) -> None:
    """Its layers are the model's, to whoever moves blocks."""
    seen = set[str | None]()
    for name, method in (("one", "eagle3"), ("two", "eagle3"), ("two", "mtp"), ("two", "ngram")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").write_text(name)
        draft = SimpleNamespace(method=method, uses_draft_kv_cache=lambda m=method: m != "ngram")
        draft.draft_model_config = SimpleNamespace(model=str(tmp_path / name), revision=None)
        seen.add(fields_of(tmp_path / "model", draft=draft).get("draft"))
    assert len(seen) == 4
    assert None in seen


ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 2048}
OLD = SimpleNamespace(model_type="phi3", rope_parameters={"type": "su"})
OLD.original_max_position_embeddings = 2048


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (SimpleNamespace(model_type="phi3", rope_parameters=ROPE), 2048),
        (SimpleNamespace(model_type="phi3", rope_parameters={"full_attention": ROPE}), 2048),
        (OLD, 2048),
        (SimpleNamespace(model_type="llama4_text", rope_parameters=None), 32768),
    ],
)
def test_models_that_long_contexts_change(tmp_path: Path, text: Any, limit: int) -> None:
    """vLLM computes short prompts otherwise too, where long ones are allowed."""
    short, same, long = (
        fields_of(tmp_path, hf_text_config=text, max_model_len=length)["max_model_len"]
        for length in (limit - 100, limit, limit + 1)
    )
    assert short == same == f"up to {limit}"
    assert long == f"over {limit}"
