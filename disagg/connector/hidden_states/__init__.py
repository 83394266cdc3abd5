"""Each request's hidden states in its own file, and how a client reads it.

The client's functions are here and import neither vLLM nor an engine. The connector is
`disagg.connector.HiddenStatesConnector`.
"""

from disagg.connector.hidden_states.reader import cleanup_hidden_states, load_hidden_states
from disagg.errors import (
    HiddenStatesError,
    HiddenStatesFailed,
    HiddenStatesLost,
    HiddenStatesTimeout,
)

__all__ = [
    "HiddenStatesError",
    "HiddenStatesFailed",
    "HiddenStatesLost",
    "HiddenStatesTimeout",
    "cleanup_hidden_states",
    "load_hidden_states",
]
