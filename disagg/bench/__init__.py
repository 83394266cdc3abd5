"""Measuring all of the above, and showing it."""
