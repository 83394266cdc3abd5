"""One vLLM engine in one Ray actor, and its OpenAI server.

Importing this package imports neither vLLM nor Ray; `disagg.engine.actor` imports Ray,
and vLLM is imported by the actor's process alone, when it starts.
"""
