"""How many prefill and decode engines a load wants: a simulation, and a search over it.

Knows measured speeds and no engine: imports neither vLLM nor Ray, asks nothing over the network,
and must never guess a speed that nobody measured.
"""
