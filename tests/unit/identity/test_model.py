"""Which model an engine computes with, as its configuration says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.identity.model import model_fields


def adjust(config: Any) -> Any:
    return config


def fields_of(folder: Path, **more: Any) -> dict[str, str]:
    """Of an engine whose model lies there; `more`: of vLLM's model config, or a draft."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    model: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "hf_overrides": {},
        "hf_config_path": None,
    }
    model |= {"multimodal_config": None, "max_model_len": 4096}
    model |= {"hf_text_config": SimpleNamespace(model_type="qwen3", rope_parameters={})}
    config: Any = SimpleNamespace(speculative_config=more.pop("draft", None))
    config.model_config = SimpleNamespace(**{**model, **more})
    return model_fields(config)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"rope_parameters": {"rope_theta": 1e6}, "a": 1}, '{"a": 1, "rope_parameters": '),
        (adjust, f"{adjust.__module__}.adjust"),
    ],
)
def test_an_overridden_configuration(tmp_path: Path, overrides: Any, text: str) -> None:
    """Weights alone do not say how far a rotation turns."""
    plain = fields_of(tmp_path)
    assert {name for name, value in plain.items() if value} == {"checkpoint"}
    told = fields_of(tmp_path, hf_overrides=overrides)
    assert told["hf_overrides"].startswith(text)
    assert fields_of(tmp_path, hf_config_path=str(tmp_path))["hf_config_path"]
    kwargs = SimpleNamespace(mm_processor_kwargs={"min_pixels": 9})
    told = fields_of(tmp_path, multimodal_config=kwargs)
    assert told["mm_processor_kwargs"] == '{"min_pixels": 9}'


def test_a_draft_with_a_cache(tmp_path: Path) -> None:
    """Its layers are the model's, to whoever moves blocks."""
    seen = set[str]()
    for name, method in (("one", "eagle3"), ("two", "eagle3"), ("two", "mtp"), ("two", "ngram")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "model.safetensors").write_text(name)
        draft = SimpleNamespace(method=method, uses_draft_kv_cache=lambda m=method: m != "ngram")
        draft.draft_model_config = SimpleNamespace(model=str(tmp_path / name), revision=None)
        seen.add(fields_of(tmp_path / "model", draft=draft)["draft"])
    assert len(seen) == 4
    assert "" in seen


ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 2048}
OLD = SimpleNamespace(model_type="phi3", rope_parameters={"type": "su"})
OLD.original_max_position_embeddings = 2048


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (SimpleNamespace(model_type="phi3", rope_parameters=ROPE), 2048),
        (SimpleNamespace(model_type="phi3", rope_parameters={"full_attention": ROPE}), 2048),
        (OLD, 2048),
        (SimpleNamespace(model_type="llama4_text", rope_parameters=None), 32768),
    ],
)
def test_models_that_long_contexts_change(tmp_path: Path, text: Any, limit: int) -> None:
    """vLLM computes short prompts otherwise too, where long ones are allowed."""
    short, same, long = (
        fields_of(tmp_path, hf_text_config=text, max_model_len=length)["long_context"]
        for length in (limit - 100, limit, limit + 1)
    )
    assert short == same == f"max_model_len up to {limit}"
    assert long == f"max_model_len over {limit}"
