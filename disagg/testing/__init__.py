"""Shared by the demo, benchmarks, chaos commands and tests: a checkpoint, servers, clients."""
