"""Samplers: they choose the clips of a batch."""
