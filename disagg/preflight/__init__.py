"""Checks and the resolved plan of a deployment, before anything is started."""
