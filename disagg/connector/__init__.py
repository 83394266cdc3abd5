"""When and what to move: the vLLM side of a handoff.

`DisaggConnector` is loaded by vLLM itself, through `kv_connector_module_path: disagg.connector`.
It has a scheduler half, which decides, and a worker half per rank, which moves.
"""

from disagg.connector.connector import DisaggConnector
from disagg.connector.registration import register

register("DisaggConnector", __name__)

__all__ = ["DisaggConnector"]
