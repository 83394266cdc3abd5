"""The vLLM side of the tiers in `disagg.store`.

`DisaggOffloadConnector` is loaded by vLLM itself, through `kv_connector_module_path:
disagg.connector.offload`, alone or with `DisaggConnector` in vLLM's MultiConnector. Its scheduler
half decides what to move; a worker half per rank moves it.
"""

from disagg.connector.offload.connector import DisaggOffloadConnector
from disagg.connector.registration import register

register("DisaggOffloadConnector", __name__)

__all__ = ["DisaggOffloadConnector"]
