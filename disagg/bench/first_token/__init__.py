"""Decode's first token: after a handoff, from tiers, computed, and by peers."""
