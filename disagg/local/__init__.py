"""The deployments of this user on this machine, without Ray."""
