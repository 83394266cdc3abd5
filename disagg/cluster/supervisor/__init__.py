"""The supervisor: restarts, scaling and autoscaling of a deployment's engines."""
