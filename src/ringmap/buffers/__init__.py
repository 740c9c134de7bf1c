"""Buffers: what users write to and sample from."""
