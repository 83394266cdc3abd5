"""When and what to move: the vLLM side.

vLLM loads them itself, through `kv_connector_module_path: disagg.connector`:
`DisaggConnector` hands KV blocks over, `HiddenStatesConnector` writes hidden states to files.

They are imported when they are asked for: who only reads hidden states has no vLLM.
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
