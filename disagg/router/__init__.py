"""The OpenAI endpoint in front of both pools: pairing, both legs, upstream HTTP, metrics.

Imports neither vLLM nor Ray, so it starts in a blink and runs in front of any vLLM servers.
"""
