"""The control channel and leases."""
