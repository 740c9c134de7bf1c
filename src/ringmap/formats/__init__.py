"""Formats: what a dataset looks like on disk."""
