"""Pools of engine actors on Ray: placing, watching, stopping.

`start` starts a deployment and returns a `RunningDeployment`. `serve` runs a deployment in the
foreground, for the command line.
"""

from disagg.cluster.deployment import RunningDeployment, start
from disagg.cluster.serve import serve

__all__ = ["RunningDeployment", "serve", "start"]
