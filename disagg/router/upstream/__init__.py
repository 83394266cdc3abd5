"""HTTP to engines."""
