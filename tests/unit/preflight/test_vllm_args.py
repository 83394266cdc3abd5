"""What is read of vLLM's arguments from its source."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from disagg.preflight import vllm_args

pytestmark = pytest.mark.skipif(vllm_args.known_arguments() is None, reason="vLLM is not installed")

# Prints vLLM's own values of all that we read from its source.
_ASK_VLLM = """
import json, sys
from dataclasses import fields
from typing import get_args

import vllm.config as config
from vllm.config.speculative import SpeculativeMethod
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers.registry import _VLLM_TOKENIZERS
from vllm.tool_parsers import ToolParserManager
from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER
from vllm.v1.attention.backends.registry import AttentionBackendEnum

classes = {
    name: sorted(f.name for f in fields(getattr(config, name)) if f.init)
    for name in ("CompilationConfig", "KVEventsConfig", "ProfilerConfig", "SpeculativeConfig",
                 "StructuredOutputsConfig", "EPLBConfig", "AttentionConfig")
}
print("\\n" + json.dumps({
    "arguments": sorted({f.name for c in (AsyncEngineArgs, FrontendArgs) for f in fields(c)}),
    "tool_call_parser": ToolParserManager.list_registered(),
    "reasoning_parser": ReasoningParserManager.list_registered(),
    "load_format": sorted(_LOAD_FORMAT_TO_MODEL_LOADER),
    "quantization": sorted(QUANTIZATION_METHODS),
    "tokenizer_mode": sorted({*_VLLM_TOKENIZERS, "auto"}),
    "config_format": sorted({*_CONFIG_FORMAT_TO_CONFIG_PARSER, "auto"}),
    "attention_backend": sorted(AttentionBackendEnum.__members__),
    "methods": sorted(get_args(SpeculativeMethod)),
    "classes": classes,
}))
"""
_ARGUMENTS_OF = {
    "CompilationConfig": "compilation_config",
    "KVEventsConfig": "kv_events_config",
    "ProfilerConfig": "profiler_config",
    "SpeculativeConfig": "speculative_config",
    "StructuredOutputsConfig": "structured_outputs_config",
    "EPLBConfig": "eplb_config",
    "AttentionConfig": "attention_config",
}


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    """vLLM's own answers; its import takes ten seconds."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK_VLLM], capture_output=True, text=True, timeout=300, check=True
    )
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("argument", sorted(vllm_args._REGISTRIES))
def test_the_known_names_are_those_that_vllm_registers(
    asked: dict[str, Any], argument: str
) -> None:
    assert sorted(vllm_args.known_names(argument) or ()) == sorted(asked[argument])


@pytest.mark.slow
def test_the_known_arguments_and_keys_are_those_of_vllms_classes(asked: dict[str, Any]) -> None:
    public = {name for name in asked["arguments"] if not name.startswith("_")}
    assert set(vllm_args.known_arguments() or ()) == public
    for name, argument in _ARGUMENTS_OF.items():
        keys = vllm_args.keys_of_class(argument)
        assert keys is not None
        assert keys.is_closed
        assert {key for key in asked["classes"][name] if key[0] != "_"} <= set(keys.types)
    methods = vllm_args.keys_of_class("speculative_config")
    assert methods is not None
    assert sorted(methods.types["method"].words) == asked["methods"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_model_len", "16k", 16_000),
        ("max_model_len", "16K", 16_384),
        ("max_model_len", "1.5k", 1_500),
        ("max_model_len", "auto", -1),
        ("max_num_seqs", "16k", None),  # vLLM reads a suffix for some arguments only
        ("max_num_seqs", "auto", None),
        ("max_num_seqs", "16", 16),
        ("kv_cache_memory_bytes", "2G", 2 << 30),
        ("gpu_memory_utilization", 0.5, 0.5),
        ("gpu_memory_utilization", True, None),
    ],
)
def test_numbers_are_read_as_on_vllms_command_line(name: str, value: Any, expected: Any) -> None:
    assert vllm_args.as_number(name, value) == expected


def test_bounds_come_from_the_class_that_takes_the_argument() -> None:
    assert vllm_args.bounds("gpu_memory_utilization") == {"gt": 0, "le": 1}
    assert vllm_args.bounds("max_num_seqs") == {"ge": 1}
    assert vllm_args.bounds("tensor_parallel_size") == {"ge": 1}
    assert vllm_args.bounds("seed") == {}
