"""Datasets: episodes read as clips."""
