"""One request through both legs."""
