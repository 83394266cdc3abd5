"""What an engine computes with: two engines that differ in it have no block in common."""
