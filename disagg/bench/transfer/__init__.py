"""How fast blocks move between two workers, and the upper bounds of the hardware."""
