"""Blocks over TCP, read from and written to the caches' memory."""
