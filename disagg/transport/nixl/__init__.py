"""NIXL as a transport: its agents move the bytes, our leases say which and whether they count."""
