"""What the engines' caches hold, as their KV events tell."""
