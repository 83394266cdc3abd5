"""The table `model x GPU x dtype`: one process per GPU; `python -m gpu_layouts.report hopper`.

Prints one line of JSON for each row. Must run in a process of its own: it becomes that GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpu_layouts import proven, registered, stand_in
from gpu_layouts.models import MODELS
from gpu_layouts.tables import Row

DTYPES = ("auto", "fp8")
PACKED = ("int8_per_token_head",)
"""Tried with the first model alone: formats with scales in the blocks."""
CONNECTOR: Mapping[str, Any] = {
    "kv_connector": "DisaggConnector",
    "kv_connector_module_path": "disagg.connector",
    "kv_role": "kv_both",
    "engine_id": "gpu",
    "kv_connector_extra_config": {"transports": ["tcp"]},
}
VARIANTS: dict[str, dict[str, Any]] = {"": {}, "block_size: 128": {"block_size": 128}}
"""Settings of engines besides the defaults, tried with the first model."""


def row(gpu: str, model: str, dtype: str, mode: Any) -> Row:
    """Build it, and try both connectors."""
    name, _, variant = model.partition(" + ")
    try:
        cache = registered.registered(
            MODELS[name], mode, CONNECTOR, kv_cache_dtype=dtype, **VARIANTS[variant]
        )
    except Exception as error:  # noqa: BLE001 - vLLM's own, of any kind: it is the row's answer
        return Row(gpu, model, dtype, built=f"vLLM: {_line(error)}")
    sizes = [group.kv_cache_spec.block_size for group in cache.cache.kv_cache_groups]
    blocks = "/".join(map(str, dict.fromkeys(sizes)))
    if tuple(sizes) != cache.kernel_blocks:
        blocks += f" in {'/'.join(map(str, dict.fromkeys(cache.kernel_blocks)))}"
    handoff, tiers = (_tried(prove, cache) for prove in (proven.handoff, proven.tiers))
    identity = proven.identity(cache) if handoff == proven.RIGHT else ""
    backends = ", ".join(cache.backends)
    return Row(gpu, model, dtype, "", backends, blocks, cache.layout, handoff, tiers, identity)


def _tried(prove: Any, cache: registered.Registered) -> str:
    try:
        return proven.verdict(prove, cache)
    except Exception as error:  # noqa: BLE001 - the test that reads this row fails by it
        traceback.print_exc()
        return f"WRONG: {_line(error)}"


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpu", choices=stand_in.GPUS)
    parser.add_argument("--models", nargs="*", default=[*MODELS, _varied()])
    parser.add_argument("--dtypes", nargs="*")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("DISAGG_SECRET", "correct horse battery")
    mode = stand_in.install(stand_in.GPUS[args.gpu])
    registered.start_parallel_groups()
    for model in args.models:
        more = PACKED if model == next(iter(MODELS)) else ()
        for dtype in args.dtypes or (*DTYPES, *more):
            print(json.dumps(asdict(row(args.gpu, model, dtype, mode))), flush=True)
    sys.stdout.flush()
    os._exit(0)  # kernels that are not there cannot be taken down in order


def _varied() -> str:
    return f"{next(iter(MODELS))} + block_size: 128"


if __name__ == "__main__":
    main()
