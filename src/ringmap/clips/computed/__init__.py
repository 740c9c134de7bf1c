"""Computed columns: small classes, each with one method over whole batches."""
