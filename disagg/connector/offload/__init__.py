"""Blocks below the accelerator: the vLLM side of the tiers in `disagg.store`.

`DisaggOffloadConnector` is loaded by vLLM itself, through `kv_connector_module_path:
disagg.connector.offload`, alone or beside `DisaggConnector` in vLLM's MultiConnector. It has a
scheduler half, which decides, and a worker half per rank, which moves.
"""

from disagg.connector.offload.connector import DisaggOffloadConnector
from disagg.connector.registration import register

register("DisaggOffloadConnector", __name__)

__all__ = ["DisaggOffloadConnector"]
