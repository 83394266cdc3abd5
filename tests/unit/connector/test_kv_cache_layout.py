"""What vLLM says of a cache, as we read it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from unit.connector.modelless import PLAIN, _cache_config, _engine_config
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg.connector import DisaggConnector, cache_fingerprint, kv_cache_layout, whole_pages
from disagg.connector.offload import groups, setup, slot_layout
from disagg.connector.offload.groups import Group
from disagg.connector.offload.settings import OffloadSettings
from disagg.errors import ConfigError
from disagg.vllm_compat import versions

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
    assert whole_pages.layer_specs(cache.kv_cache_groups[0]) == [*specs]
    assert not kv_cache_layout.has_windows(cache)
    assert groups.read(cache) == [Group()]


def test_windows_in_layers_of_different_sizes() -> None:
    cache = of_layers(
        *(SlidingWindowSpec(num_kv_heads=n, sliding_window=40, **SHAPE) for n in (4, 1))
    )
    assert kv_cache_layout.has_windows(cache)
    assert groups.read(cache) == [Group(window=40)]


@pytest.mark.parametrize("method", [None, "ngram", "eagle3", "extract_hidden_states"])
def test_which_guesses_are_handed_over(method: str | None) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="m", use_mla=False, enable_sleep_mode=False),
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=16),
        speculative_config=method and SimpleNamespace(method=method),
    )
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(["a"], full(2))])
    if method == "extract_hidden_states":
        with pytest.raises(ConfigError, match=r"speculative_config.method: extract_hidden_states"):
            kv_cache_layout.check_supported(config, cache)
    else:
        kv_cache_layout.check_supported(config, cache)


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
            kv_cache_layout.hash_seed(config, "x")
        return
    shown = kv_cache_layout.hash_seed(config, "x")
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert kv_cache_layout.hash_seed(config, "x") != shown


# ---- what two engines must have alike ---------------------------------------------------------


Made = tuple[VllmConfig, KVCacheConfig]


@pytest.fixture
def made(model: Path) -> Made:
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config = _engine_config(model, transfer, 8, True)
    return config, _cache_config(config, 8, KVCacheLayout.LBHNC, PLAIN)


def set_block_size(config: VllmConfig, cache: KVCacheConfig) -> None:
    config.cache_config.block_size = 16


def test_other_versions_of_vllm_differ_by_name(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """Those with the same blocks have one name; others are refused by the field `vllm`."""
    found = {}
    for vllm in ("0.31.0", "0.32.0", "0.33.0"):
        monkeypatch.setattr(versions, "installed", lambda vllm=vllm: vllm)
        found[vllm] = cache_fingerprint.fingerprint(*made)
    assert found["0.31.0"] == found["0.32.0"]
    differ = {name for name, value in found["0.33.0"].items() if value != found["0.32.0"][name]}
    assert differ == {"vllm"}


def set_dtype(config: VllmConfig, cache: KVCacheConfig) -> None:
    config.model_config.dtype = torch.bfloat16


def set_quantization(config: VllmConfig, cache: KVCacheConfig) -> None:
    config.model_config.quantization = "fp8"


def set_cache_dtype(config: VllmConfig, cache: KVCacheConfig) -> None:
    config.cache_config.cache_dtype = "fp8"


def set_hash(config: VllmConfig, cache: KVCacheConfig) -> None:
    config.cache_config.prefix_caching_hash_algo = "sha256_cbor"


def set_layout(config: VllmConfig, cache: KVCacheConfig) -> None:
    cache.kv_cache_layout = "BLHNC"


def set_heads(config: VllmConfig, cache: KVCacheConfig) -> None:
    config.model_config.model_arch_config.total_num_kv_heads *= 2


def set_window(config: VllmConfig, cache: KVCacheConfig) -> None:
    cache.kv_cache_groups[0].kv_cache_spec = SlidingWindowSpec(
        num_kv_heads=2, sliding_window=40, **SHAPE
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (set_block_size, "block_size"),
        (set_dtype, "dtype"),
        (set_quantization, "quantization"),
        (set_cache_dtype, "kv_cache_dtype"),
        (set_hash, "prefix_caching_hash_algo"),
        (set_layout, "kv_cache_layout"),
        (set_heads, "kv_heads"),
        (set_window, "kv_cache_groups"),
    ],
)
def test_what_differs_is_in_the_fingerprint(made: Made, change: Any, field: str) -> None:
    config, cache = made
    before = cache_fingerprint.fingerprint(config, cache)
    assert cache_fingerprint.fingerprint(config, cache) == before
    change(config, cache)
    after = cache_fingerprint.fingerprint(config, cache)
    assert field in {name for name in before if before[name] != after[name]}


def test_the_cache_dtype_is_compared_by_what_it_means(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = made
    assert cache_fingerprint.kv_cache_dtype(config) == "float32"
    config.model_config.dtype = torch.bfloat16
    auto = cache_fingerprint.kv_cache_dtype(config)
    config.cache_config.cache_dtype = "bfloat16"
    assert auto == cache_fingerprint.kv_cache_dtype(config) == "bfloat16"
    config.cache_config.cache_dtype = "fp8"
    plain = cache_fingerprint.kv_cache_dtype(config)
    amd = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fnuz)
    monkeypatch.setattr(cache_fingerprint, "current_platform", amd)
    assert (plain, cache_fingerprint.kv_cache_dtype(config)) == ("fp8", "fp8 fnuz")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_bytes_of_amds_fp8(dtype: torch.dtype) -> None:
    cache = kv_cache_layout.block_cache({"a": torch.zeros(2, 1, 16, 8, dtype=dtype)})
    assert cache.regions[0].dtype == "U8"


def test_all_gpus_are_asked_for_one_layout(made: Made) -> None:
    config, _ = made
    required = DisaggConnector.get_required_kvcache_layout
    assert required(config) is None, "a CPU's kernels have their own"
    config.device_config = cast(Any, SimpleNamespace(device_type="cuda"))
    assert required(config) == "LBHNC"


def test_engines_that_sleep_are_refused(made: Made) -> None:
    config, cache = made
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ConfigError, match=r"^enable_sleep_mode: True — .*; unset it$"):
        kv_cache_layout.check_supported(config, cache)


def test_a_gpus_blocks_may_be_divided(made: Made) -> None:
    """So its block size may be another one; a CPU's kernels pack the tokens of a block."""
    config, cache = made
    assert not kv_cache_layout.splits_blocks(config)
    config.device_config = cast(Any, SimpleNamespace(device_type="cuda"))
    assert kv_cache_layout.splits_blocks(config)
    before = cache_fingerprint.fingerprint(config, cache)
    set_block_size(config, cache)
    assert cache_fingerprint.fingerprint(config, cache) == before


# ---- pipeline stages, in tiers ---------------------------------------------------------------


def staged(size: int, layers: int) -> Any:
    parallel = SimpleNamespace(pipeline_parallel_size=size, tensor_parallel_size=2)
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: layers)
    return SimpleNamespace(parallel_config=parallel, model_config=model)


def test_stages_have_as_many_slots_whoever_counts() -> None:
    assert setup.stages(staged(1, 10)) == []
    config = staged(3, 10)
    assert setup.stages(config) == [3, 4, 3]
    assert setup.ranks(config) == 6
    settings = OffloadSettings(host_bytes=100 * full(2).page_size_bytes, blocks_per_chunk=2)
    for layers in setup.stages(config):
        names = [f"layer.{n}" for n in range(layers)]
        cache = KVCacheConfig(4, [], [KVCacheGroupSpec(names, full(2))])
        assert setup.layout(settings, config, cache).slots == 100 // (4 * 2)
        described = slot_layout.fields(cache, setup.stages(config))
        assert described["stages"] == "3, 4, 3"
        assert described["group"].startswith("10 FullAttentionSpec")


@pytest.mark.parametrize("layers", [["a"], ["a", "b"], ["a", "b", "draft"]])
def test_stages_that_are_not_of_like_layers(
    layers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache_layout, "check_supported", lambda config, cache: None)
    config = staged(2, 4)
    config.cache_config = SimpleNamespace(enable_prefix_caching=True)
    specs = [full(1 if name == "draft" else 2) for name in layers]
    cache = (
        of_layers(*specs)
        if "draft" in layers
        else KVCacheConfig(4, [], [KVCacheGroupSpec(layers, full(2))])
    )
    if layers == ["a", "b"]:
        setup.check_supported(config, cache, 1)
        return
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 2"):
        setup.check_supported(config, cache, 1)
