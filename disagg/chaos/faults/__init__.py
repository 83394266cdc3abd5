"""`disagg bench faults`: what handoff connectors do when something goes wrong."""
