"""Serve large language models with prefill and decode apart, on Ray."""

__version__ = "0.2.0.dev0"
