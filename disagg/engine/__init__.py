"""One vLLM engine in one Ray actor, and its OpenAI server.

Importing this package imports neither vLLM nor Ray. `disagg.engine.actor` imports Ray. Only the
actor's process imports vLLM, when the engine starts.
"""
