"""Single engine arguments that vLLM or disagg refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unit.preflight.deployments import deployment_with, problems_of

from disagg.preflight import checks, vllm_args, vllm_source

needs_vllm = pytest.mark.skipif(vllm_args.known_arguments() is None, reason="vLLM is not installed")


def line_of(args: dict[str, Any]) -> str:
    (line,) = problems_of(engine={"args": args})
    return line


RANKS = "set data_parallel_size; each rank gets its own"


def accept(args: dict[str, Any]) -> None:
    checks.check(deployment_with(engine={"args": args}))


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("data_parallel_address", "10.0.0.1", RANKS),
        ("data_parallel_external_lb", True, RANKS),
        ("data_parallel_hybrid_lb", True, RANKS),
        ("data_parallel_multi_port_external_lb", True, RANKS),
        ("data_parallel_rank", 0, RANKS),
        ("data_parallel_rpc_port", 29550, RANKS),
        ("data_parallel_size_local", 2, RANKS),
        ("data_parallel_start_rank", 1, RANKS),
        ("data_parallel_backend", "ray", "remove it; Ray places each rank as an engine"),
        ("enable_elastic_ep", True, "remove it; scale replicas, whose groups are whole"),
        ("kv_offloading_size", 4, "set tiers.host.max_bytes"),
        (
            "nnodes", 2,
            "set distributed_executor_backend: ray, and num_gpus for all ranks",
        ),
    ],
)  # fmt: skip
def test_what_disagg_decides_is_not_the_users(name: str, value: Any, fix: str) -> None:
    assert line_of({name: value}) == f"engine.args.{name}: {value!r} — set by disagg; {fix}"


def test_values_that_change_nothing_pass() -> None:
    accept(
        {
            "data_parallel_rank": None,
            "data_parallel_external_lb": False,
            "data_parallel_size_local": 1,
            "kv_offloading_size": None,
            "kv_offloading_backend": "native",
            "nnodes": 1,
        }
    )


@needs_vllm
@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("max_num_seqs", "16k", "must be a whole number"),
        ("max_model_len", "long", "must be a whole number"),
        ("gpu_memory_utilization", 90, "must be more than 0 and at most 1"),
        ("tensor_parallel_size", 0, "must be at least 1"),
        ("max_num_seqs", 0, "must be at least 1"),
        ("max_model_len", -2, "must be at least -1"),
        ("max_lora_rank", 17, "must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512"),
        ("compilation_config", 3, "must be keys with values"),
        ("compilation_config", "O3", "must be keys with values"),
        ("speculative_config", "ngram", "must be keys with values"),
        ("hf_overrides", ["a"], "must be keys with values"),
        ("tool_parser_plugin", "/no/plugin.py", "no such file; correct it"),
        ("reasoning_parser_plugin", "/no/plugin.py", "no such file; correct it"),
        (
            "chat_template",
            "/no/template.jinja",
            "no such file; correct it, or write the template itself",
        ),
        (
            "generation_config",
            "/no/folder",
            "holds no generation_config.json; name a folder that does, auto or vllm",
        ),
    ],
)
def test_a_value_that_vllm_refuses_is_one_line(name: str, value: Any, fix: str) -> None:
    assert line_of({name: value}) == f"engine.args.{name}: {value!r} — {fix}"


@needs_vllm
@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("tool_call_parser", "hermez", "hermes"),
        ("reasoning_parser", "qwen33", "qwen3"),
        ("load_format", "safetensor", "safetensors"),
        ("quantization", "fp88", "fp8"),
        ("tokenizer_mode", "mistrall", "mistral"),
        ("config_format", "hff", "hf"),
        ("attention_backend", "FLASHATTN", "FLASH_ATTN"),
    ],
)
def test_a_name_that_vllm_does_not_register_is_refused(name: str, value: str, meant: str) -> None:
    assert line_of({name: value}) == (
        f"engine.args.{name}: {value!r} — this vLLM knows none of this name; did you mean {meant}?"
    )


@needs_vllm
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("compilation_config", {"modee": 0}, "modee: vLLM has no such key; did you mean mode?"),
        (
            "kv_events_config",
            {"endpiont": "tcp://*:1"},
            "endpiont: vLLM has no such key; did you mean endpoint?",
        ),
        ("kv_events_config", {"publisher": "nats"}, "publisher: 'nats' — must be one of null, zmq"),
        (
            "speculative_config",
            {"method": "ngrams", "num_speculative_tokens": 2},
            "method: 'ngrams' — did you mean ngram?",
        ),
        (
            "speculative_config",
            {"method": "ngram", "num_speculative_tokens": 0},
            "num_speculative_tokens: 0 — must be more than 0",
        ),
        (
            "structured_outputs_config",
            {"backend": "outline"},
            "backend: 'outline' — must be one of auto, xgrammar, guidance, outlines, "
            "lm-format-enforcer",
        ),
    ],
)
def test_keys_inside_an_argument_are_checked(name: str, value: Any, line: str) -> None:
    assert line_of({name: value}) == f"engine.args.{name}.{line}"


@needs_vllm
@pytest.mark.parametrize(
    "args",
    [
        {"max_model_len": "16K"},
        {"max_model_len": "auto"},
        {"max_model_len": -1},
        {"max_num_batched_tokens": "8k"},
        {"max_num_seqs": "16"},
        {"gpu_memory_utilization": 1.0},
        {"max_lora_rank": 32},
        {"tool_call_parser": "hermes"},
        {"reasoning_parser": "qwen3"},
        {"load_format": "DUMMY"},
        {"quantization": "FP8"},
        {"quantization": None},
        {"tokenizer_mode": "auto"},
        {"config_format": "mistral"},
        {"attention_backend": "flash_attn"},
        {"compilation_config": {"mode": 0, "cudagraph_mode": "NONE", "pass_config": {}}},
        {"compilation_config": '{"max_cudagraph_capture_size": 8k}'},
        {"kv_events_config": {"enable_kv_cache_events": False, "publisher": "null"}},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'},
        {"structured_outputs_config": {"backend": "xgrammar"}},
        {"override_generation_config": '{"temperature": 0}'},
        {"hf_overrides": {"rope_theta": 1e6}},
        {"hf_overrides": '{"rope_theta": 1000000}'},
        {"chat_template": "{{ messages }}"},
        {"generation_config": "vllm"},
        {"generation_config": "org/name"},
    ],
)
def test_a_value_that_vllm_takes_passes(args: dict[str, Any]) -> None:
    accept(args)


@needs_vllm
def test_files_that_are_there_pass(tmp_path: Path) -> None:
    for name in ("plugin.py", "template.jinja"):
        (tmp_path / name).touch()
    (tmp_path / "generation_config.json").write_text(json.dumps({}))
    accept(
        {
            "chat_template": str(tmp_path / "template.jinja"),
            "generation_config": str(tmp_path),
            # A parser of a plugin may have any name.
            "tool_parser_plugin": str(tmp_path / "plugin.py"),
            "tool_call_parser": "mine",
            "reasoning_parser_plugin": str(tmp_path / "plugin.py"),
            "reasoning_parser": "mine",
        }
    )


@needs_vllm
def test_a_template_of_vllms_passes() -> None:
    package = vllm_source.root()
    assert package is not None
    templates = package / "transformers_utils/chat_templates"
    accept({"chat_template": next(templates.glob("*.jinja")).name})


@needs_vllm
def test_an_installed_plugin_may_register_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_source, "has_other_plugins", lambda: True)
    vllm_args.known_names.cache_clear()
    try:
        accept({"tool_call_parser": "mine", "load_format": "mine"})
    finally:
        vllm_args.known_names.cache_clear()


def test_data_parallel_groups() -> None:
    accept({"data_parallel_size": 2, "enable_expert_parallel": False})
    assert line_of({"data_parallel_size": 0}).startswith("engine.args.data_parallel_size: 0")
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "ipc:///tmp/events"}
    assert line_of({"data_parallel_size": 2, "kv_events_config": events}) == (
        "engine.args.data_parallel_size: 2 — vLLM numbers the ranks' ports; set tcp addresses in "
        "kv_events_config"
    )
