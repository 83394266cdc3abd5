"""A router of several processes that share one port."""
