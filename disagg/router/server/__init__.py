"""The HTTP server: the FastAPI app, API keys, limits, drain, status."""
