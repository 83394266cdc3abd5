"""Deployments and checkpoints to check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Deployment
from disagg.errors import ConfigError
from disagg.preflight import checks

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "torch_dtype": "float32",
}


def deployment_with(**sections: Any) -> Deployment:
    router = {"port": 0, **sections.pop("router", {})}
    model = sections.pop("model", {"path": "org/name"})
    return Deployment.model_validate({"model": model, "router": router, **sections})


def problems_of(**sections: Any) -> list[str]:
    """The lines of the error; it must be refused."""
    with pytest.raises(ConfigError) as caught:
        checks.check(deployment_with(**sections))
    return caught.value.problems


def make_checkpoint(folder: Path, **config: Any) -> dict[str, str]:
    """Writes a checkpoint's files, with these keys of `config.json` (`...`: without this one).
    Returns the section `model`."""
    folder.mkdir()
    keys = {key: value for key, value in (CONFIG | config).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(keys))
    (folder / "tokenizer.json").touch()
    (folder / "model.safetensors").touch()
    return {"path": str(folder)}
