"""The vLLM side: when to move blocks, and which.

vLLM loads the connectors itself, through `kv_connector_module_path: disagg.connector`:
`DisaggConnector` hands off KV blocks, `HiddenStatesConnector` writes hidden states to files.

They are imported on first use, as readers of hidden states do not need vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disagg.connector.handoff.connector import DisaggConnector
    from disagg.connector.hidden_states.connector import HiddenStatesConnector

__all__ = ["DisaggConnector", "HiddenStatesConnector"]


def __getattr__(name: str) -> object:
    if name == "DisaggConnector":
        from disagg.connector.handoff.connector import DisaggConnector

        return DisaggConnector
    if name == "HiddenStatesConnector":
        from disagg.connector.hidden_states.connector import HiddenStatesConnector

        return HiddenStatesConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
