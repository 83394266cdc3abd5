"""The OpenAI endpoint in front of both pools: pairing, both legs, upstream HTTP, metrics.

It must never import vLLM or Ray. So it starts fast, and runs in front of any vLLM server.
"""
