"""How bytes move: the control channel, its leases, and one module or folder per transport.

Imports neither vLLM nor Ray, so that transports run and are measured where neither is installed.
"""
