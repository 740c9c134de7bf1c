"""Measurements: each against a named library or control in the same run.

    python -m benchmarks [--tiny] [names...]

    harness/     what times, proves, prints and publishes
    peers/       one adapter for each other library: make, add, sample, close
    questions/   one module for each question; a suite is a function of a `Place` that yields tables

A row is a call in a mapping of calls that `Table.time` times in turn; a library is one more peer in it. What it
returns is compared with what was written before anything is timed.
"""
