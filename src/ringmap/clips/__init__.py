"""Clips: which ones there are, which to draw, how to read them. Integers and NumPy only."""
