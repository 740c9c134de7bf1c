"""Clips: which clips exist, which to draw, how to read them. Integers and NumPy only."""
