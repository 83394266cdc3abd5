"""Patches of vLLM, each with the versions it is for; `plugin.py` applies them."""
