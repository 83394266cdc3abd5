"""Unit tests mirror the package: X.py of a folder is tested by test_X.py of the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parents[1] / "disagg"


def mirrored(path: Path) -> Path:
    """What a path of the tests mirrors: `spec/` is beside the package."""
    return (PACKAGE.parent if path.parts[:1] == ("spec",) else PACKAGE) / path


# Tests of a feature that is more than one module, or of something outside the package.
FEATURES = {
    "bench/first_token/test_results.py": "what the commands keep in their results files",
    "bench/serve/test_peers.py": "the commands of other routers beside ours",
    "chaos/test_results.py": "what the commands keep in their results files",
    "cli/test_command_line.py": "the command line as its users see it",
    "connector/handoff/test_device_cache.py": "the connector with its cache on a device",
    "connector/handoff/test_modelless.py": "handoffs under vLLM's schedulers, without a model",
    "connector/handoff/test_random_handoffs.py": "random handoffs between engines without a model",
    "connector/hidden_states/test_writing.py": "writer and reader, and processes that are killed",
    "connector/offload/test_copies.py": "the worker's copies of one load",
    "connector/offload/test_device.py": "the tiers' worker with its cache on a device",
    "connector/offload/test_modelless.py": "tiers under vLLM's schedulers, without a model",
    "connector/offload/test_object_tier.py": "tiers in real object stores, without a model",
    "connector/offload/test_second_runner.py": "the order of calls of vLLM's second model runner",
    "connector/test_example.py": "examples/without_vllm_engine.py",
    "connector/test_gpu_layouts.py": "caches as GPU engines would register them, without a GPU",
    "preflight/test_several.py": "`deployments:` of the YAML, from its checks to the plan",
    "preflight/test_tiers.py": "`tiers:` of the YAML, from its checks to the engine's arguments",
    "router/test_elsewhere.py": "failover to engines that are full or rest",
    "router/test_examples.py": "the examples that talk to a router",
    "router/test_fuzz.py": "generated and mutated requests",
    "router/test_other_engines.py": "engines that change while the router serves",
    "router/pairing/test_absence.py": "requests while no decode engine is up",
    "router/test_outside_clients.py": "clients that others wrote",
    "router/server/test_browser.py": "a page of another origin, in a real browser",
    "router/server/test_sdks.py": "SDKs that others wrote",
    "router/test_process.py": "`disagg router` as real processes",
    "router/test_router.py": "the whole router over HTTP, with fake engines",
    "spec/test_growing_conformance.py": "the model of leases that grow beside the code",
    "spec/test_conformance.py": "the model of leases beside the code's lease table",
    "vllm_compat/test_next.py": "`make vllm-next`: tests/vllm_next.py and what it reads",
    "store/test_directory_model.py": "directory and index together, against a model",
    "store/objects/test_tls.py": "stores behind TLS",
    "store/test_processes.py": "several processes on one directory",
    "test_docs.py": "the documentation",
    "test_imports.py": "which package may import which",
    "test_layout.py": "this rule",
    "test_manifests.py": "the deployments and Kubernetes manifests that users copy",
    "transport/control/test_opened_transports.py": "the client's transports, opened and retried",
    "transport/device/test_kernel_compiles.py": "the CUDA kernel, compiled",
    "transport/device/test_kernel_cuda.py": "the CUDA kernel on a GPU",
    "transport/test_staged.py": "tcp and shared_storage with caches on devices",
}
FOUND = {str(file.relative_to(TESTS)) for file in TESTS.rglob("test_*.py")}


@pytest.mark.parametrize("test", sorted(FOUND | set(FEATURES)))
def test_a_test_mirrors_a_module_or_is_a_named_feature(test: str) -> None:
    assert test in FOUND, "no such test; remove its line from FEATURES"
    path = Path(test)
    module = mirrored(path.with_name(path.name.removeprefix("test_")))
    if test in FEATURES:
        assert not module.exists(), f"mirrors {module.name}; remove its line from FEATURES"
    else:
        assert module.is_file(), "rename it as the module that it tests, or name it in FEATURES"


def test_each_folder_is_a_folder_of_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py")}
    assert [str(one) for one in sorted(folders) if not mirrored(one).is_dir()] == []
