"""Arguments that do not go together, and environment variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from unit.preflight.deployments import deployment_with, problems_of

from disagg.preflight import checks

GPU = {"resources": {"num_gpus": 1}}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            {"enable_auto_tool_choice": True},
            "enable_auto_tool_choice: True — needs tool_call_parser; set the model's parser",
        ),
        (
            {"enable_log_outputs": True},
            "enable_log_outputs: True — needs enable_log_requests; set it to true",
        ),
        ({"numa_bind_nodes": [0]}, "numa_bind_nodes: [0] — needs numa_bind; set it to true"),
        ({"numa_bind_cpus": ["0-3"]}, "numa_bind_cpus: ['0-3'] — needs numa_bind; set it to true"),
        (
            {"lora_modules": ["a=org/a"]},
            "lora_modules: ['a=org/a'] — needs enable_lora; set it to true",
        ),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            "max_num_seqs: 64 — engine.args.max_num_batched_tokens: 32: max_num_seqs must be at "
            "most max_num_batched_tokens; set 32 or less",
        ),
        (
            {"max_num_active_seqs": 64, "max_num_seqs": 32},
            "max_num_active_seqs: 64 — engine.args.max_num_seqs: 32: max_num_active_seqs must be "
            "at most max_num_seqs; set 32 or less",
        ),
        (
            {"long_prefill_token_threshold": 4096, "max_model_len": "2k"},
            "long_prefill_token_threshold: 4096 — engine.args.max_model_len: '2k': "
            "long_prefill_token_threshold must be at most max_model_len; set 2000 or less",
        ),
        (
            {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2},
            "max_loras: 4 — engine.args.max_cpu_loras: 2: max_loras must be at most "
            "max_cpu_loras; set 2 or less",
        ),
        (
            {
                "enable_chunked_prefill": False,
                "max_model_len": 4096,
                "max_num_batched_tokens": 2048,
            },
            "max_model_len: 4096 — engine.args.max_num_batched_tokens: 2048: max_model_len must "
            "be at most max_num_batched_tokens; set 2048 or less",
        ),
        (
            {"disable_log_stats": True, "enable_per_request_metrics": True},
            "disable_log_stats: True — metrics of each request need it; remove one of them",
        ),
        (
            {"enable_sleep_mode": True},
            "enable_sleep_mode: True — a sleeping engine gives up the memory that other engines "
            "may still read, and ends with the first read; remove it",
        ),
        (
            {"enable_cumem_allocator": True},
            "enable_cumem_allocator: True — needs GPUs; remove it, or set num_gpus",
        ),
        (
            {"distributed_executor_backend": "external_launcher"},
            "distributed_executor_backend: 'external_launcher' — engines start their own ranks; "
            "set mp or ray",
        ),
        (
            {
                "speculative_config": {
                    "method": "extract_hidden_states",
                    "num_speculative_tokens": 1,
                }
            },
            "speculative_config.method: 'extract_hidden_states' — hidden states are not handed "
            "off; remove it",
        ),
        (
            {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
                "async_scheduling": True,
            },
            "async_scheduling: True — cannot run the draft 'ngram'; remove it",
        ),
        (
            {"profiler_config": {"profiler": "torch"}},
            "profiler_config.torch_profiler_dir: not set — the profiler torch writes to it; set it",
        ),
        (
            {"profiler_config": {"torch_profiler_dir": "/traces"}},
            "profiler_config.torch_profiler_dir: '/traces' — needs profiler: torch; set it",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_one_line(args: dict[str, Any], line: str) -> None:
    assert problems_of(engine={"args": args}) == [f"engine.args.{line}"]


@pytest.mark.parametrize(
    "args",
    [
        {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
        {"enable_auto_tool_choice": False},
        {"enable_log_outputs": True, "enable_log_requests": True},
        {"numa_bind": True, "numa_bind_nodes": [0]},
        {"enable_lora": True, "lora_modules": ["a=org/a"]},
        {"max_num_seqs": 32, "max_num_batched_tokens": 32},
        {"max_num_seqs": 1024},
        {"max_loras": 4, "max_cpu_loras": 2},
        {"max_num_active_seqs": 32, "max_num_seqs": 64},
        {"long_prefill_token_threshold": 4096, "max_model_len": -1},
        {"enable_chunked_prefill": True, "max_model_len": 4096, "max_num_batched_tokens": 2048},
        {"disable_log_stats": True},
        {"enable_sleep_mode": False},
        {"distributed_executor_backend": "mp", "tensor_parallel_size": 2},
        {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},  # mp on a CPU
        {"enable_prefix_caching": False},
        {"profiler_config": {"profiler": "torch", "torch_profiler_dir": "/traces"}},
        {"async_scheduling": True},
    ],
)
def test_arguments_that_go_together_pass(args: dict[str, Any]) -> None:
    checks.check(deployment_with(engine={"args": args}))


def test_on_gpus_engines_may_not_sleep_either() -> None:
    args = {"enable_sleep_mode": True, "enable_cumem_allocator": True}
    (line,) = problems_of(engine={"args": args}, prefill=GPU, decode=GPU)
    assert line.startswith("engine.args.enable_sleep_mode: True — a sleeping engine gives up")


def test_on_gpus_one_process_runs_one_rank() -> None:
    args = {"distributed_executor_backend": "uni", "tensor_parallel_size": 2}
    gpus = {"resources": {"num_gpus": 2}}
    (line,) = problems_of(engine={"args": args}, prefill=gpus, decode=gpus)
    assert line == (
        "engine.args.distributed_executor_backend: 'uni' — runs one rank, and the engine has "
        "several; set mp"
    )
    one = {"args": {"distributed_executor_backend": "uni"}}
    checks.check(deployment_with(engine=one, prefill=GPU, decode=GPU))


def test_expert_load_balancing_needs_expert_parallelism() -> None:
    args = {"enable_eplb": True}
    (line,) = problems_of(engine={"args": args}, prefill=GPU, decode=GPU)
    assert line == "engine.args.enable_eplb: True — needs enable_expert_parallel; set it to true"


def test_tiers_need_prefix_caching() -> None:
    args = {"enable_prefix_caching": False}
    (line,) = problems_of(decode={"args": args}, tiers={"host": {"max_bytes": 1 << 20}})
    assert line.startswith("decode.args.enable_prefix_caching: False — tiers find blocks by")


def test_autoscaling_needs_metrics() -> None:
    pool = {"autoscale": {"max_replicas": 2}}
    (line,) = problems_of(engine={"args": {"disable_log_stats": True}}, decode=pool)
    assert line.startswith("engine.args.disable_log_stats: True — decode.autoscale follows")


def adapter(folder: Path, rank: int) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return str(folder)


def test_adapters_are_looked_at(tmp_path: Path) -> None:
    small, large = adapter(tmp_path / "small", 8), adapter(tmp_path / "large", 64)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/adapter_config.json").write_text("{")
    modules = [f"a={small}", json.dumps({"name": "b", "path": large}), "c=org/name"]
    passing = {"enable_lora": True, "max_lora_rank": 64, "lora_modules": modules}
    checks.check(deployment_with(engine={"args": passing}))
    failing = [
        f"a={large}",
        f"a={tmp_path}/none",
        f"a={tmp_path}/broken",
        {"name": "a", "path": small},
        "a",
    ]
    args = {"enable_lora": True, "lora_modules": failing}
    lines = problems_of(engine={"args": args})
    assert [line.partition(": ")[0] for line in lines] == [
        f"engine.args.lora_modules.{number}" for number in range(5)
    ]
    words = ("set max_lora_rank to 64 or more", "holds no adapter_config.json", "can't be read",
             'must be text: "NAME=PATH"', 'must be text: "NAME=PATH"')  # fmt: skip
    assert all(word in line for word, line in zip(words, lines, strict=True))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PROMETHEUS_MULTIPROC_DIR", "/tmp/metrics", "engines would count each other's metrics"),
        ("VLLM_DP_SIZE", "2", "engines are no data parallel ranks of each other"),
        ("VLLM_DP_RANK", "1", "engines are no data parallel ranks of each other"),
        ("VLLM_DP_MASTER_PORT", "1", "engines are no data parallel ranks of each other"),
        (
            "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
            "shm",
            "engines on one node would share the buffer",
        ),
        ("VLLM_PORT", "5000", "engines on one node would race for the same ports"),
    ],
)
def test_a_variable_that_engines_must_not_share_is_refused(
    name: str, value: str, reason: str
) -> None:
    lines = problems_of(engine={"env": {name: value}})
    assert lines == [f"engine.env.{name}: {value!r} — {reason}; remove it"]
    (line,) = problems_of(decode={"env": {name: value}})
    assert line.startswith(f"decode.env.{name}: ")


def test_expandable_segments_move_the_cache() -> None:
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (line,) = problems_of(engine={"env": env}, prefill=GPU, decode=GPU)
    assert line.startswith("engine.env.PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True' — ")
    args = {"enable_cumem_allocator": True}
    checks.check(deployment_with(engine={"env": env, "args": args}, prefill=GPU, decode=GPU))
    checks.check(deployment_with(engine={"env": env}))


@pytest.mark.parametrize("space", ["0.5", "1GiB", "-1"])
def test_the_kv_space_is_a_whole_number(space: str) -> None:
    (line,) = problems_of(engine={"env": {"VLLM_CPU_KVCACHE_SPACE": space}})
    assert line.startswith(f"engine.env.VLLM_CPU_KVCACHE_SPACE: '{space}' — must be a whole number")
