"""Inside vLLM's MultiConnector, a load that fails ends as our connector's settings say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from disagg.connector.handoff.connector import DisaggConnector
from disagg.connector.offload.connector import DisaggOffloadConnector
from disagg.engine.vllm_patches import load_failure_policy, patching

OURS, TIERS, OTHER = "DisaggConnector", "DisaggOffloadConnector", "ExampleConnector"


def test_the_names_are_those_of_our_connectors() -> None:
    names = (DisaggConnector.__name__, DisaggOffloadConnector.__name__)
    assert names == load_failure_policy.OURS


@pytest.mark.parametrize(
    ("names", "extra", "policy"),
    [
        ([OURS, TIERS], {}, "recompute"),
        ([OURS], {"strict": False}, "recompute"),
        ([TIERS, OURS], {"strict": True}, "fail"),
        ([OTHER], {}, "fail"),  # vLLM's default
        ([OTHER, TIERS], {}, "recompute"),
    ],
)
def test_the_outer_config_says_what_the_inner_ones_need(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    names: list[str],
    extra: dict[str, Any],
    policy: str,
) -> None:
    monkeypatch.setattr(VllmConfig, "__post_init__", VllmConfig.__post_init__)
    inner = [
        {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra if name == OURS else {},
        }
        for name in names
    ]
    transfer = KVTransferConfig(  # made before the plugin, like that of a command line
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": inner},
    )
    patching.install([load_failure_policy.PATCH])
    patching.install([load_failure_policy.PATCH])
    args = EngineArgs(str(model), max_model_len=64, enforce_eager=True, kv_transfer_config=transfer)
    config = args.create_engine_config()
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_load_failure_policy == policy
