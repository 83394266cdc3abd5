"""How many prefill and decode engines a load needs: a simulation, and a search over it.

The simulation uses measured speeds. The package must never import vLLM or Ray, use the network, or
guess a speed that was not measured.
"""
