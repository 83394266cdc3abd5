"""What an engine must be to have its hidden states written: judged on vLLM's real configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from disagg.connector import HiddenStatesConnector
from disagg.connector.hidden_states.checks import find_group
from disagg.errors import ConfigError


def config(model: Path, layers: list[Any] | None, **options: Any) -> Any:
    """What vLLM makes of these arguments; no engine is started."""
    speculative = None
    if layers is not None:
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        }
    args = EngineArgs(str(model), speculative_config=speculative, max_model_len=512, **options)
    return args.create_engine_config()


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (None, "speculative_config: must use the method extract_hidden_states"),
        ([], r"eagle_aux_hidden_state_layer_ids: \[\] — name each layer once"),
        ([1, 1], "name each layer once"),
        ([1, 3], r"\[1, 3\] — name each layer once, from 0 \(the embeddings\) to 2"),
        ([-1], "name each layer once"),
        (["1"], "name each layer once"),
    ],
)
def test_what_cannot_be_written_is_refused(model: Path, layers: list[Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_group(config(model, layers), None)  # type: ignore[arg-type]


def test_the_interface_that_vllm_sees(model: Path) -> None:
    """Its class properties, without an engine."""
    fitting = config(model, [1, 2])
    assert HiddenStatesConnector.get_required_kvcache_layout(fitting) is None  # of a CPU's cache
    fitting.device_config.device_type = "cuda"
    assert HiddenStatesConnector.get_required_kvcache_layout(fitting) == "LBNHC"
