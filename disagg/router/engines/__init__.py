"""What the router knows of each engine: health, compatibility, adapters."""
