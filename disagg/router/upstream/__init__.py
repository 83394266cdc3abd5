"""The HTTP clients for engines."""
