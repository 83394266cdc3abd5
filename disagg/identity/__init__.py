"""Identifies the model and weights of an engine; engines that differ in them share no blocks."""
