"""The router's metrics, access log and traces."""
