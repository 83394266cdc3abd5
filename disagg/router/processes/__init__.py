"""A router of several processes on one port."""
