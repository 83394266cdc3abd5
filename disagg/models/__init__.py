"""Models to try disagg with, from the Python package index: no account, no model hub."""
