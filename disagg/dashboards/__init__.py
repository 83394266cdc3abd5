"""A Grafana dashboard of the metrics of router and engines, and the command that sets it up.

`panels.py` defines the panels. `grafana.py` makes `disagg.json` of them. `provision.py` sends that
file to a Grafana. Nothing here runs while requests are served.
"""
