"""The HTTP server: the FastAPI app, keys, limits, drain, status."""
