"""The small deployment on CPU engines that the demo, the chaos commands and tests run."""

from __future__ import annotations

from pathlib import Path

from disagg import config

MODEL = Path(".cache/models/tiny")


def cpu_deployment(name: str, model: Path = MODEL, max_model_len: int = 16384) -> config.Deployment:
    """`serve_configs/cpu-1p1d.yaml` on any free port; built here so that it runs anywhere.

    Short prompts are handed off too, to exercise handoffs. Requests name the model `tiny`.
    """
    args = {
        "dtype": "float32",
        "block_size": 128,
        "max_model_len": max_model_len,
        "enforce_eager": True,
    }
    return config.Deployment.model_validate(
        {
            "name": name,
            "model": {"path": str(model.absolute()), "served_name": "tiny"},
            "engine": {"args": args, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}},
            "router": {"port": 0, "pairing": {"local_prefill_tokens": 0}},
        }
    )
