"""Measurements: one module per row, each against a named rival or control in the same run.

    python -m benchmarks [--tiny] [names...]

A module has `run(place) -> list[Table]`; a rival from another package is one more entry of the
mapping that it hands to `in_turn`, behind a check that the two batches are equal.
"""
