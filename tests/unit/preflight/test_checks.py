"""The checks against the machine, before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from unit.preflight.deployments import deployment_with, problems_of

from disagg.connector.handoff.settings import ConnectorSettings, read_settings
from disagg.engine.args import engine_args
from disagg.engine.spec import EngineSpec
from disagg.preflight import checks, vllm_args
from disagg.preflight.argument_keys import ROLES
from disagg.preflight.resolved_plan import resolve
from disagg.transport.nixl.settings import NixlSettings
from disagg.vllm_compat import versions


@pytest.fixture
def needs_vllm() -> None:
    if vllm_args.known_arguments() is None:
        pytest.skip("vLLM is not installed")


def test_a_sound_deployment_passes() -> None:
    checks.check(deployment_with(engine={"args": {"dtype": "float32", "block_size": 128}}))


@pytest.mark.usefixtures("needs_vllm")
@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            {"max_model_length": 1},
            "engine.args.max_model_length: vLLM has no such argument; did you mean max_model_len?",
        ),
        ({"enforce_eager": "yes"}, "engine.args.enforce_eager: 'yes' — must be true or false"),
        (
            {"dtype": "fp32"},
            "engine.args.dtype: 'fp32' — must be one of auto, half, float16, bfloat16, float, "
            "float32",
        ),
        ({"max_num_seqs": [1]}, "engine.args.max_num_seqs: [1] — must be a whole number"),
        ({"block_size": 16}, "engine.args.block_size: 16 — vLLM on CPU needs a multiple of 32; "
         "set 32"),
        ({"block_size": 0}, "engine.args.block_size: 0 — must be at least 1"),
        ({"model": "x"}, "engine.args.model: 'x' — set by disagg; set model.path"),
        (
            {"kv_transfer_config": {}},
            "engine.args.kv_transfer_config: {} — set by disagg; set the keys of the transfer "
            "section",
        ),
        (
            {"decode_context_parallel_size": 2},
            "engine.args.decode_context_parallel_size: 2 — such blocks can't be handed off; "
            "set 1 or remove it",
        ),
    ],
)  # fmt: skip
def test_a_wrong_engine_argument_is_one_line(args: dict[str, Any], line: str) -> None:
    assert problems_of(engine={"args": args}) == [line]


@pytest.mark.usefixtures("needs_vllm")
@pytest.mark.parametrize(
    "args",
    [
        {"max_model_len": "16k"},
        {"gpu_memory_utilization": 1},
        {"compilation_config": {"mode": 0}},
        {"quantization": None},
        {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    ],
)
def test_arguments_that_vllm_accepts_pass(args: dict[str, Any]) -> None:
    checks.check(deployment_with(engine={"args": args}))


def test_on_gpus_the_block_size_is_left_to_vllm() -> None:
    resources = {"resources": {"num_gpus": 1}}
    checks.check(
        deployment_with(engine={"args": {"block_size": 16}}, prefill=resources, decode=resources)
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (
            {"dtype": "float16"},
            {},
            "prefill.args.dtype: 'float16' — decode.args.dtype: not set: they must be equal, or no "
            "block can be exchanged; set only engine.args.dtype",
        ),
        ({"block_size": 64}, {}, "prefill.args.block_size: 64"),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}, "decode.args.kv_cache_dtype"),
        ({"enable_lora": True}, {}, "prefill.args.enable_lora"),
        (
            {"enable_lora": True, "lora_modules": ["a=org/a"]},
            {"enable_lora": True, "lora_modules": ["a=org/b"]},
            "decode.args.lora_modules",
        ),
        (
            {"speculative_config": {"method": "eagle3", "model": "org/head"}},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
            "decode.args.speculative_config: {'method': 'ngram', 'num_speculative_tokens': 3}: "
            "this draft has a KV cache",
        ),
        (
            {"max_model_len": 4096},
            {"max_model_len": 2048},
            "decode.args.max_model_len: 2048 — prefill.args.max_model_len: 4096: decode must "
            "accept every prompt that prefill accepts; set 4096 or more",
        ),
    ],
)
def test_pools_that_cannot_exchange_blocks_name_both_keys(
    prefill: dict[str, Any], decode: dict[str, Any], words: str
) -> None:
    (line,) = problems_of(prefill={"args": prefill}, decode={"args": decode})
    assert words in line


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"block_size": 128}, {}),
        ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        ({"tensor_parallel_size": 2}, {}),
        ({}, {"pipeline_parallel_size": 2}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"max_num_seqs": 4}, {"max_num_seqs": 8}),
        ({"max_model_len": "4k"}, {"max_model_len": "auto"}),
        ({"max_model_len": "4k"}, {"max_model_len": "4K"}),
        ({"max_model_len": 2048}, {"max_model_len": 4096}),
    ],
)
def test_pools_may_differ_where_blocks_stay_alike(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    checks.check(deployment_with(prefill={"args": prefill}, decode={"args": decode}))


def test_block_sizes_of_gpu_pools_must_divide() -> None:
    gpu = {"resources": {"num_gpus": 1}}
    checks.check(
        deployment_with(
            prefill={**gpu, "args": {"block_size": 16}}, decode={**gpu, "args": {"block_size": 64}}
        )
    )
    (line,) = problems_of(
        prefill={**gpu, "args": {"block_size": 48}}, decode={**gpu, "args": {"block_size": 64}}
    )
    assert "one must divide the other" in line


def test_a_pools_own_argument_wins_and_is_the_key_named() -> None:
    (line,) = problems_of(engine={"args": {"block_size": 128}}, decode={"args": {"block_size": 64}})
    assert line.startswith("engine.args.block_size: 128 — decode.args.block_size: 64")


def test_resources_must_fit_the_pools() -> None:
    assert "different layouts" in problems_of(prefill={"resources": {"num_gpus": 1}})[0]
    pool = {"resources": {"num_gpus": 1}, "args": {"tensor_parallel_size": 2}}
    assert problems_of(prefill=pool, decode=pool) == [
        f"{role}.resources.num_gpus: 1 — {role}.args.tensor_parallel_size is 2; set num_gpus to 2"
        for role in ("prefill", "decode")
    ]


def test_an_engine_has_a_gpu_for_each_rank() -> None:
    args = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    pool = {"resources": {"num_gpus": 6}, "args": args}
    checks.check(deployment_with(prefill=pool, decode=pool))
    pool = {"resources": {"num_gpus": 2}, "args": args}
    assert problems_of(prefill=pool, decode=pool) == [
        f"{role}.resources.num_gpus: 2 — {role}.args.tensor_parallel_size is 2 and "
        f"{role}.args.pipeline_parallel_size is 3; set num_gpus to 6"
        for role in ("prefill", "decode")
    ]


def test_pipeline_stages_on_cpu_are_warmed_up() -> None:
    """vLLM warms up only compiled models. Without a warm-up the engine fails at a request."""
    args = {"pipeline_parallel_size": 2}
    made = deployment_with(prefill={"args": args})
    specs = [EngineSpec(made, role, 0, "run", "/tmp/kv", True, "s", "k") for role in ROLES]
    prefill, decode = (engine_args(spec, host="127.0.0.1", engine_id="1") for spec in specs)
    assert "enforce_eager" not in prefill
    assert prefill["compilation_config"]["backend"] == "eager"
    assert decode["enforce_eager"] is True
    (line,) = problems_of(engine={"args": {"enforce_eager": True}}, decode={"args": args})
    assert line.startswith("engine.args.enforce_eager: True — with it, an engine with pipeline")


def test_rays_executor_wants_gpus() -> None:
    args = {"distributed_executor_backend": "ray"}
    gpu = {"resources": {"num_gpus": 1}}
    checks.check(deployment_with(engine={"args": args}, prefill=gpu, decode=gpu))
    (line,) = problems_of(decode={"args": args})
    assert line.startswith("decode.args.distributed_executor_backend: 'ray' — vLLM's Ray executor")


@pytest.mark.parametrize("loopback", [True, False])
@pytest.mark.parametrize("executor", ["ray", "mp"])
def test_ranks_on_several_nodes_listen_each_on_its_own(executor: str, loopback: bool) -> None:
    made = deployment_with(engine={"args": {"distributed_executor_backend": executor}})
    spec = EngineSpec(made, "decode", 0, "run", "/tmp/kv", loopback, "s", "k")
    transfer = engine_args(spec, host="10.0.0.1", engine_id="1")["kv_transfer_config"]
    host = transfer["kv_connector_extra_config"]["host"]
    assert host == (None if executor == "ray" and not loopback else "10.0.0.1")


def test_the_model_must_be_there(tmp_path: Path) -> None:
    (line,) = problems_of(model={"path": str(tmp_path / "gone")})
    assert line.startswith(f"model.path: '{tmp_path}/gone' — no such folder")
    assert line.endswith(f"make one with: disagg make-model {tmp_path}/gone")
    (line,) = problems_of(model={"path": str(tmp_path / "smollm2-135m")})
    assert line.endswith("get it with: disagg get-model smollm2-135m")
    (line,) = problems_of(model={"path": "/tmp/ray/working_dir_files/_ray_pkg_1/m"})
    assert line.endswith("set DISAGG_FOLDER to the folder in which relative paths start")
    (line,) = problems_of(model={"path": str(tmp_path)})
    assert line.endswith("holds no config.json; name a checkpoint's folder")


@pytest.mark.parametrize("folder", ["file/below", "file", "/proc/disagg/kv"])
def test_the_storage_folder_must_be_writable(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    (line,) = problems_of(transfer={"storage": {"path": str(tmp_path / folder)}})
    assert line.startswith("transfer.storage.path: ")
    assert "can't be written" in line


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = {"path": str(tmp_path / "a" / "b"), "max_bytes": 1}
    checks.check(deployment_with(transfer={"storage": storage}))
    assert list(tmp_path.iterdir()) == []


def test_little_free_space_is_a_warning(tmp_path: Path) -> None:
    storage = {"path": str(tmp_path), "max_bytes": 1 << 60}
    warnings = checks.check(deployment_with(transfer={"storage": storage}))
    assert any(line.startswith("transfer.storage.max_bytes: ") for line in warnings)


def test_the_port_must_be_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (line,) = problems_of(router={"port": port})
    fix = "set another port, or 0 for a free one"
    assert line == f"router.port: {port} — in use on 127.0.0.1; {fix}"
    checks.check(deployment_with(router={"port": port}))


def test_the_host_must_be_this_machines() -> None:
    assert "not an address of this machine" in problems_of(router={"host": "192.0.2.1"})[0]
    assert problems_of(router={"host": "no.such.host.invalid"})[0].startswith("router.host: ")


def test_an_open_endpoint_without_keys_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    open_router = {"host": "0.0.0.0"}
    assert any("no API keys" in line for line in checks.check(deployment_with(router=open_router)))
    monkeypatch.setenv("KEYS", "one")
    with_keys = deployment_with(router={**open_router, "api_keys_env": "KEYS"})
    assert not any("no API keys" in line for line in checks.check(with_keys))


def test_secrets_and_keys_are_read_before_the_start() -> None:
    lines = problems_of(
        transfer={"secret_env": "DISAGG_UNSET"},
        router={"api_keys_file": "/nonexistent/keys", "tls_cert_file": "/nonexistent/cert"},
    )
    assert [line.split(":")[0] for line in lines] == [
        "transfer.secret_env",
        "router.api_keys_file",
        "router.tls_key_file",
    ]


def test_the_secrets_variable_is_not_the_users() -> None:
    (line,) = problems_of(engine={"env": {"DISAGG_SECRET": "x" * 32}})
    assert line == "engine.env.DISAGG_SECRET: set by disagg; set transfer.secret_env instead"
    (line,) = problems_of(decode={"env": {"VLLM_API_KEY": "x" * 32}})
    assert line == "decode.env.VLLM_API_KEY: set by disagg; set router.api_keys_env instead"


def test_without_vllm_a_warning_says_that_names_are_unchecked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_args, "known_arguments", lambda: None)
    warnings = checks.check(deployment_with(engine={"args": {"no_such_thing": 1}}))
    assert any("arguments are not checked" in line for line in warnings)


@pytest.mark.parametrize(
    ("num_gpus", "transports", "words"),
    [
        (0, ["cuda_ipc", "nccl"], "on CPUs; add tcp"),
        (1, ["process_memory"], "on GPUs; add tcp"),
    ],
)
def test_some_transport_must_fit_the_engines(
    num_gpus: int, transports: list[str], words: str
) -> None:
    pool = {"resources": {"num_gpus": num_gpus}}
    (line,) = problems_of(prefill=pool, decode=pool, transfer={"transports": transports})
    assert line.startswith(f"transfer.transports: {transports}")
    assert line.endswith(words)
    checks.check(
        deployment_with(prefill=pool, decode=pool, transfer={"transports": [*transports, "tcp"]})
    )


def test_a_vllm_that_does_not_tell_where_it_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = deployment_with(router={"pairing": {"prefill": "cache_aware"}})
    assert not any("cache_aware" in line for line in checks.check(deployment))
    monkeypatch.setattr(versions, "installed", lambda: "0.30.1")
    (line,) = checks._unheard(deployment)
    assert line.startswith("router.pairing: cache_aware — the router cannot hear")
    assert "vLLM 0.30.1 what engines hold, so prefix_affinity chooses; install vLLM 0.31" in line


def test_strict_handoffs_and_shared_caches() -> None:
    router = {"pairing": {"prefill": "cache_aware", "share_caches": "always"}}
    (line,) = problems_of(router=router, transfer={"strict": True})
    assert line.startswith("router.pairing.share_caches: 'always' — with transfer.strict")
    checks.check(deployment_with(router=router))


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning, as another transport is used; a problem where there is none."""
    monkeypatch.setattr(checks, "nixl_installed", lambda: False)
    (line,) = problems_of(transfer={"transports": ["nixl"]})
    assert line.startswith("transfer.transports: ['nixl'] — NIXL is not installed here")
    assert "pip install nixl-cu13" in line
    warnings = checks.check(deployment_with(transfer={"transports": ["nixl", "tcp"]}))
    assert sum("pip install nixl-cu13" in line for line in warnings) == 1
    assert not any("NIXL" in line for line in checks.check(deployment_with()))


def test_nixls_settings_reach_the_connector_only_where_it_is_used() -> None:
    nixl = {"params": {"num_workers": 2}, "num_threads": 3, "tcp": True}

    def settings(transports: list[str]) -> ConnectorSettings:
        deployment = deployment_with(transfer={"transports": transports, "nixl": nixl})
        spec = EngineSpec(deployment, "prefill", 0, "run", "/tmp/kv", True, "s", "k")
        config = engine_args(spec, host="127.0.0.1", engine_id="1")["kv_transfer_config"]
        return read_settings(config["kv_connector_extra_config"])

    assert settings(["nixl", "tcp"]).nixl == NixlSettings("UCX", {"num_workers": "2"}, 3, True)
    assert settings(["tcp"]).nixl == NixlSettings()


@pytest.mark.engine
@pytest.mark.usefixtures("needs_vllm")
def test_the_names_are_vllms_own() -> None:
    """We read them from the source. To ask vLLM itself takes an import of ten seconds."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    known = vllm_args.known_arguments()
    assert known is not None
    public = {field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert public <= set(known)


def test_the_plan_shows_merged_values_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cret" * 5)
    resolved = resolve(
        deployment_with(
            engine={"args": {"block_size": 64, "seed": 1}, "env": {"A": 1}},
            prefill={"args": {"block_size": 128}, "env": {"B": 2}, "replicas": 2},
            transfer={
                "secret_env": "MY_SECRET",
                "storage": {"path": "/tmp/kv"},
                "staging_bytes": 1 << 20,
            },
        )
    )
    connector = resolved["decode"]["args"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert connector["staging_bytes"] == resolved["transfer"]["staging_bytes"] == 1 << 20
    assert resolved["prefill"]["args"]["block_size"] == 128
    assert resolved["decode"]["args"]["block_size"] == 64
    assert resolved["prefill"]["env"]["B"] == "2"
    assert "B" not in resolved["decode"]["env"]
    assert resolved["prefill"]["replicas"] == 2
    assert resolved["transfer"]["storage_path"] == "/tmp/kv"
    assert "s3cret" not in repr(resolved)
    assert "VLLM_API_KEY" not in resolved["prefill"]["env"]
    assert resolved["router"]["endpoint"].startswith("http://")
