"""A Grafana dashboard of the metrics of router and engines, and the command that sets it up.

`panels.py` says what is shown, `grafana.py` makes `disagg.json` of it, `provision.py` takes that
file to a Grafana. Nothing here runs while requests are served.
"""
