"""Pools of engine actors on Ray: placing, watching, stopping.

`start` brings a deployment up from Python and hands it over; `serve` runs one in the
foreground for the command line.
"""

from disagg.cluster.deployment import RunningDeployment, start
from disagg.cluster.serve import serve

__all__ = ["RunningDeployment", "serve", "start"]
