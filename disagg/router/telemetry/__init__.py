"""Metrics, access log, traces."""
