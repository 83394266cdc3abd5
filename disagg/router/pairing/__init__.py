"""Chooses the prefill and the decode engine of each request."""
