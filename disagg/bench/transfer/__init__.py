"""How fast blocks move between two workers, and what the hardware could do."""
