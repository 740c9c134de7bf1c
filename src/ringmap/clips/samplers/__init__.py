"""Samplers: which clips a batch is made of."""
