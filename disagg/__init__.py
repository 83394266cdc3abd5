"""Serve large language models with prefill and decode apart, on Ray."""

__version__ = "0.1.0"
