"""Arguments against the checkpoint that they serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unit.preflight.deployments import deployment_with, make_checkpoint, problems_of

from disagg.preflight import checks, vllm_args


def check(model: dict[str, str], args: dict[str, Any], **sections: Any) -> None:
    checks.check(deployment_with(model=model, engine={"args": args}, **sections))


def line_of(model: dict[str, str], args: dict[str, Any], **sections: Any) -> str:
    (line,) = problems_of(model=model, engine={"args": args}, **sections)
    return line


# ---- length --------------------------------------------------------------------------------


def test_a_length_above_the_models_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    assert line_of(model, {"max_model_len": 32769}) == (
        "engine.args.max_model_len: 32769 — the model's config.json has max_position_embeddings "
        "32768; set 32768 or less, or remove it"
    )
    assert "'33k'" in line_of(model, {"max_model_len": "33k"})
    for length in (32768, "32K", -1, "auto", None):
        check(model, {"max_model_len": length})


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 131072),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 65536),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 65536),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32768),
        ({"rope_scaling": None}, 32768),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 262144),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0,
                              "original_max_position_embeddings": 32768}},
            32768,
        ),
        ({"max_position_embeddings": ..., "n_positions": 1024}, 1024),
        ({"model_type": "gemma3", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 32768),
        ({"seq_length": 8192}, 8192),
        ({"model_max_length": 131072}, 131072),
    ],
)  # fmt: skip
def test_the_length_is_vllms(tmp_path: Path, config: dict[str, Any], longest: int) -> None:
    model = make_checkpoint(tmp_path / "model", **config)
    check(model, {"max_model_len": longest})
    assert f"set {longest} or less" in line_of(model, {"max_model_len": longest + 1})


def test_a_length_that_the_model_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path / "a", max_position_embeddings=...), {"max_model_len": 10**5})
    check({"path": "org/name"}, {"max_model_len": 10**6})


def test_the_length_may_be_overridden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    args = {"max_model_len": 40_000}
    env = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    checks.check(deployment_with(model=model, engine={"args": args, "env": env}))
    check(model, args | {"hf_overrides": {"max_position_embeddings": 40_000}})
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check(model, args)


def test_the_language_models_part_counts(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 2048, "num_attention_heads": 6, "num_key_value_heads": 6}
    model = make_checkpoint(tmp_path / "model", max_position_embeddings=..., text_config=text)
    assert "set 2048 or less" in line_of(model, {"max_model_len": 2049})
    check(model, {"tensor_parallel_size": 3})


def test_a_cached_model_of_a_hub_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc\n")
    (repository / "snapshots").mkdir()
    make_checkpoint(repository / "snapshots/abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "set 32768 or less" in line_of({"path": "org/name"}, {"max_model_len": 32769})
    assert "32768" in line_of({"path": "org/name", "revision": "abc"}, {"max_model_len": 32769})
    check({"path": "org/name", "revision": "other"}, {"max_model_len": 32769})
    check({"path": "org/other"}, {"max_model_len": 32769})


# ---- ranks ---------------------------------------------------------------------------------


def test_heads_must_be_split_evenly(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    assert line_of(model, {"tensor_parallel_size": 3}) == (
        "engine.args.tensor_parallel_size: 3 — must divide the 4 attention heads of the model; "
        "set one of 1, 2, 4"
    )
    for ranks in (1, 2, 4):  # 4: two ranks share each KV head
        check(model, {"tensor_parallel_size": ranks})
    check({"path": "org/name"}, {"tensor_parallel_size": 3})


def test_kv_heads_must_be_split_or_shared_evenly(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    model = make_checkpoint(tmp_path / "model", **heads)
    assert line_of(model, {"tensor_parallel_size": 6}) == (
        "engine.args.tensor_parallel_size: 6 — must divide the 4 KV heads of the model, or be a "
        "multiple; set one of 1, 2, 4, 12"
    )
    check(model, {"tensor_parallel_size": 12})
    latent = make_checkpoint(tmp_path / "latent", **heads, kv_lora_rank=512)
    check(latent, {"tensor_parallel_size": 6})


def test_each_stage_needs_a_layer(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    assert line_of(model, {"pipeline_parallel_size": 5}) == (
        "engine.args.pipeline_parallel_size: 5 — the model has 4 layers, and each stage needs "
        "one; set 4 or less"
    )
    check(model, {"pipeline_parallel_size": 4})


def test_the_draft_is_split_too(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    draft = make_checkpoint(tmp_path / "draft", num_attention_heads=3, num_key_value_heads=3)
    speculative = {"method": "draft_model", "model": draft["path"], "num_speculative_tokens": 2}
    args: dict[str, Any] = {"speculative_config": speculative}
    check(model, args)
    assert line_of(model, args | {"tensor_parallel_size": 2}) == (
        "engine.args.tensor_parallel_size: 2 — must divide the 3 attention heads of the draft; "
        "set one of 1, 3"
    )
    own = {"speculative_config": speculative | {"draft_tensor_parallel_size": 1}}
    check(model, own | {"tensor_parallel_size": 2})
    own = {"speculative_config": speculative | {"draft_tensor_parallel_size": 2}}
    assert line_of(model, own) == (
        "engine.args.speculative_config.draft_tensor_parallel_size: 2 — must be 1 or the model's "
        "tensor_parallel_size; set one of 1"
    )


def test_the_draft_must_be_there(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    draft = {"method": "eagle3", "model": str(tmp_path / "none"), "num_speculative_tokens": 2}
    assert line_of(model, {"speculative_config": draft}) == (
        f"engine.args.speculative_config.model: '{tmp_path}/none' — no such folder; correct it"
    )
    check(model, {"speculative_config": draft | {"model": "org/head"}})
    check(model, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})
    assert line_of(model, {"speculative_config": {"method": "ngram"}}) == (
        "engine.args.speculative_config.num_speculative_tokens: not set — the draft guesses this "
        "many; set it"
    )


# ---- kinds of models -----------------------------------------------------------------------


@pytest.mark.skipif(vllm_args.known_arguments() is None, reason="vLLM is not installed")
def test_some_models_are_not_served_in_float16(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", model_type="gemma2")
    assert line_of(model, {"dtype": "half"}) == (
        "engine.args.dtype: 'half' — vLLM refuses it for models of type gemma2; set bfloat16 or "
        "float32"
    )
    check(model, {"dtype": "bfloat16"})
    check(make_checkpoint(tmp_path / "other"), {"dtype": "half"})


def test_expert_parallelism_needs_experts(tmp_path: Path) -> None:
    args = {"enable_expert_parallel": True}
    assert line_of(make_checkpoint(tmp_path / "dense"), args) == (
        "engine.args.enable_expert_parallel: True — the model's config.json names no experts; "
        "remove it"
    )
    check(make_checkpoint(tmp_path / "experts", num_local_experts=8), args)
    check({"path": "org/name"}, args)


def test_a_group_needs_experts(tmp_path: Path) -> None:
    """vLLM says so too, after a minute."""
    args = {"data_parallel_size": 2}
    assert "names no experts" in line_of(make_checkpoint(tmp_path / "dense"), args)
    check(make_checkpoint(tmp_path / "experts", num_local_experts=8), args)
    check(make_checkpoint(tmp_path / "dense2"), {"data_parallel_size": 1})


# ---- the checkpoint's files ----------------------------------------------------------------


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    for text, words in (("{", "its config.json can't be read"), ("[]", "holds no keys")):
        (tmp_path / "model/config.json").write_text(text)
        assert words in line_of(model, {"max_model_len": 1024})


def test_a_checkpoint_has_a_tokenizer(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()
    assert line_of(model, {}) == (
        f"model.path: '{tmp_path}/model' — holds no tokenizer; copy its files there, or set "
        "model.tokenizer"
    )
    check(model, {"skip_tokenizer_init": True})
    check({**model, "tokenizer": "org/name"}, {})
    (tmp_path / "model/tekken.json").touch()
    check(model, {})


def test_a_checkpoint_has_weights(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    assert line_of(model, {}).startswith(f"model.path: '{tmp_path}/model' — holds no weights (")
    check(model, {"load_format": "dummy"})
    (tmp_path / "model/pytorch_model.bin").touch()
    check(model, {})


def test_a_half_copied_checkpoint_is_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": {f"layer.{n}": shard for n, shard in enumerate(shards * 2)}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model" / shards[0]).touch()
    assert line_of(model, {}) == (
        f"model.path: '{tmp_path}/model' — 2 files of model.safetensors.index.json are missing, "
        f"such as {shards[1]}; copy them there"
    )
    for shard in shards[1:]:
        (tmp_path / "model" / shard).touch()
    check(model, {})
