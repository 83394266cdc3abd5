"""Models of the lease protocol, and the checker that visits all of their states."""
